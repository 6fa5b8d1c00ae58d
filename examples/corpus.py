"""A corpus without end: simple, correct English and Japanese about a small world, split by what is said.

world.toml holds the facts and the wordings; the functions here choose among them. Every text has keys that name its
content, and a key belongs to one split for ever: what is held out was never said in training, alone or inside a longer
conversation. Closed facts (a capital, a colour) are held out by their wording: the fact is known from another one.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

LANGUAGES = ("en", "ja")
SPLITS = ("train", "calibration", "heldout")
_SHARES = (86, 5, 9)  # per cent of the keys
_ALWAYS = "always:"
_TIMES = "\N{MULTIPLICATION SIGN}"
_WORLD: dict[str, Any] = tomllib.loads((Path(__file__).parent / "world.toml").read_text(encoding="utf-8"))
_LISTS: dict[str, list[Any]] = _WORLD["lists"]
_LAND: list[Any] = _WORLD["animals"]
_ANIMALS: list[Any] = _LAND + _WORLD["water_animals"]
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_SEASONS = (("winter", "冬"), ("spring", "春"), ("summer", "夏"), ("autumn", "秋"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text: a conversation (user and model by turns), or plain prose in a single turn."""

    language: str
    kind: str
    """The kind of its last question, or of the prose."""
    keys: tuple[str, ...]
    turns: tuple[str, ...]

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return len(self.turns) > 1

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat templates take it; empty for prose."""
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(self.turns)] if self.is_chat else []

    @property
    def has_one_answer(self) -> bool:
        """Whether the last answer is the only right one in its wording."""
        return self.is_chat and self.kind != "story"


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What is said, before it has words: which wordings fit it, its name, and what fills their slots."""

    wordings: str
    name: str
    slots: dict[str, Any]


def find_split(key: str) -> str:
    """The split that a key belongs to."""
    if key.startswith(_ALWAYS):
        return "train"
    point = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100
    return SPLITS[0] if point < _SHARES[0] else SPLITS[1] if point < _SHARES[0] + _SHARES[1] else SPLITS[2]


def make_documents(split: str, seed: int) -> Iterator[Document]:
    """Documents of a split, without end, languages by turns; the same seed gives the same ones."""
    rng = Random(f"{split} {seed}")
    while True:
        for language in LANGUAGES:
            yield _prose(rng, language, split) if rng.random() < 0.2 else _chat(rng, language, split)


def make_conversations(split: str, seed: int, count: int) -> list[Document]:
    """Different conversations of one question, kinds and languages by turns, greetings left out (all are trained on).

    Fewer than `count` if the split has no more to say.
    """
    rng = Random(f"{split} conversations {seed}")
    kinds = [kind for kind in _MAKERS if kind != "greeting"]
    found: dict[tuple[str, ...], Document] = {}
    for number in range(4 * count):
        kind, language = kinds[number // 2 % len(kinds)], LANGUAGES[number % 2]
        drawn = _draw(rng, language, kind, split)
        if drawn is not None and len(found) < count:
            found.setdefault(drawn[1:], Document(language=language, kind=kind, keys=drawn[:1], turns=drawn[1:]))
    return list(found.values())


def _chat(rng: Random, language: str, split: str) -> Document:
    drawn: list[tuple[str, str, str]] = []
    wanted, kind = rng.choice((1, 1, 1, 2, 3)), ""
    while len(drawn) < wanted:
        kind = rng.choices(tuple(_MAKERS), weights=[weight for _, weight in _MAKERS.values()])[0]
        item = _draw(rng, language, kind, split)
        drawn += [item] if item is not None else []
    turns = tuple(turn for _, question, answer in drawn for turn in (question, answer))
    return Document(language=language, kind=kind, keys=tuple(key for key, _, _ in drawn), turns=turns)


def _prose(rng: Random, language: str, split: str) -> Document:
    while True:
        kind = rng.choice(("story", "scenes"))
        keys, *texts = _story_text(rng) if kind == "story" else _scenes_text(rng)
        if all(find_split(key) == split for key in keys):
            return Document(language=language, kind=kind, keys=keys, turns=(texts[LANGUAGES.index(language)],))


def _draw(rng: Random, language: str, kind: str, split: str) -> tuple[str, str, str] | None:
    """Key, question and answer of a kind, or None if the split has none."""
    for _ in range(200):
        content = _MAKERS[kind][0](rng)
        wordings: list[str] = _WORLD["wordings"][content.wordings][language]
        number = rng.randrange(len(wordings))
        key = f"{kind}/{content.name}"
        if wordings[0].startswith("*"):
            key = f"{_ALWAYS if wordings[number].startswith('*') else ''}{key}/{language}/{number}"
        if find_split(key) == split:
            capitals = {name.capitalize(): _cap(str(value)) for name, value in content.slots.items()}
            question, _, answer = (
                wordings[number].removeprefix("*").format(**(capitals | content.slots)).partition(" | ")
            )
            return key, question, answer
    return None


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def _plural(noun: str) -> str:
    plurals: dict[str, str] = _WORLD["irregular_plurals"]
    return plurals.get(noun, f"{noun}s")


def _list(words: Sequence[object], last: str = "and") -> str:
    *most, end = map(str, words)
    return f"{', '.join(most)} {last} {end}" if most else end


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _capital(rng: Random) -> Content:
    country, country_ja, city, city_ja, continent = rng.choice(_LISTS["countries"])
    other = rng.choice([row for row in _LISTS["countries"] if row[2] != city])
    slots = {
        **{"country": country, "country_ja": country_ja, "city": city, "city_ja": city_ja, "continent": continent},
        **{"continent_ja": _WORLD["continents"][continent], "other": other[2], "other_ja": other[3]},
    }
    return Content(wordings="capital", name=country, slots=slots)


def _animal(rng: Random, wordings: str = "animal") -> Content:
    name, name_ja, group, legs, _, food, home = rng.choice(_ANIMALS)
    slots = {
        **{"one": _a(name), "many": _plural(name), "name_ja": name_ja, "food": food, "food_ja": _WORLD["foods"][food]},
        **{"a_group": _a(group), "group_ja": _WORLD["classes"][group], "legs": _NUMBERS[legs]},
        "legs_ja": f"の足は{legs}本です" if legs else "に足はありません",
        **dict(zip(("home", "home_ja"), _WORLD["homes"][home], strict=True)),
    }
    return Content(wordings=wordings, name=name, slots=slots)


def _describe(rng: Random) -> Content:
    return _animal(rng, "describe")


def _larger(rng: Random) -> Content:
    first, second = rng.sample(_ANIMALS, 2)
    while abs(first[4] - second[4]) < 2:
        first, second = rng.sample(_ANIMALS, 2)
    small, big = sorted((first, second), key=lambda row: int(row[4]))
    rows = {"first": first, "second": second, "small": small, "big": big}
    slots = {slot: _a(row[0]) for slot, row in rows.items()} | {f"{slot}_ja": row[1] for slot, row in rows.items()}
    return Content(wordings="larger", name=f"{small[0]}/{big[0]}", slots=slots)


def _legs(rng: Random) -> Content:
    name, name_ja, group, legs, size, _, _ = rng.choice(_LAND)
    count = rng.randint(2, 9)
    counter = "羽" if group == "bird" else "頭" if size >= 8 else "匹"
    slots = {"many": _plural(name), "name_ja": name_ja, "count": count, "counter": counter, "total": legs * count}
    return Content(wordings="legs", name=f"{name}/{count}", slots=slots)


def _colour(rng: Random) -> Content:
    thing, thing_ja, colour = rng.choice(_LISTS["coloured"])
    colour_ja = next(noun for name, _, noun in _LISTS["colours"] if name == colour)
    slots = {"thing": thing, "thing_ja": thing_ja, "colour": colour, "colour_ja": colour_ja}
    return Content(wordings="colour", name=thing, slots=slots)


def _opposite(rng: Random) -> Content:
    row = rng.choice(_LISTS["opposites"])
    (a, a_ja), (b, b_ja) = rng.sample((row[:2], row[2:]), 2)
    return Content(wordings="opposite", name=a, slots={"a": a, "a_ja": a_ja, "b": b, "b_ja": b_ja})


def _sum(rng: Random) -> Content:
    sign = rng.choice(f"++-{_TIMES}")
    a, b = (rng.randint(1, 9), rng.randint(1, 9)) if sign == _TIMES else (rng.randint(0, 20), rng.randint(0, 20))
    if sign == "-" and a < b:
        a, b = b, a
    word, word_ja, result = {
        **{"+": ("plus", "たす", a + b), "-": ("minus", "ひく", a - b), _TIMES: ("times", "かける", a * b)}
    }[sign]
    slots = {"a": a, "b": b, "sign": sign, "word": word, "word_ja": word_ja, "result": result}
    return Content(wordings="sum", name=f"{a}{sign}{b}", slots=slots)


def _order(rng: Random) -> Content:
    numbers = rng.sample(range(1, 31), rng.choice((3, 4)))
    slots = {"numbers": _list(numbers), "numbers_ja": "、".join(map(str, numbers))}
    for slot, told in (("up", sorted(numbers)), ("down", sorted(numbers, reverse=True))):
        slots |= {slot: ", ".join(map(str, told)), f"{slot}_ja": "、".join(map(str, told))}
    return Content(wordings="order", name=str(sorted(numbers)), slots=slots)


def _number(rng: Random) -> Content:
    form = rng.choice(("number", "after", "row"))
    if form == "number":
        a, b = rng.sample(range(100), 2)
        low, high = sorted((a, b))
        return Content(wordings=form, name=f"{low}/{high}", slots={"a": a, "b": b, "low": low, "high": high})
    if form == "after":
        a = rng.randrange(100)
        return Content(wordings=form, name=f"after/{a}", slots={"a": a, "b": a + 1})
    start, step = rng.randint(1, 40), rng.randint(1, 6)
    row = [str(start + step * i) for i in range(3)]
    slots = {"row": ", ".join(row), "row_ja": "、".join(row), "next": start + 3 * step}
    return Content(wordings=form, name=f"row/{start}/{step}", slots=slots)


def _day(rng: Random) -> Content:
    today, steps, past = rng.randrange(7), rng.randint(1, 6), rng.random() < 0.4
    (day, day_ja), (other, other_ja) = _LISTS["days"][today], _LISTS["days"][(today + (-steps if past else steps)) % 7]
    slots = {
        **{"today": day, "today_ja": day_ja, "other": other, "other_ja": other_ja},
        **{"steps": _count(steps, "day"), "steps_ja": steps},
    }
    return Content(wordings="day_before" if past else "day_after", name=f"{day}/{steps}/{past}", slots=slots)


def _month(rng: Random) -> Content:
    month = rng.randrange(12)
    slots: dict[str, Any] = {"length": _MONTH_LENGTHS[month]}
    for slot, other in (("name", month), ("after", (month + 1) % 12), ("before", (month - 1) % 12)):
        slots |= {slot: _LISTS["months"][other], f"{slot}_ja": f"{other + 1}月"}
    slots["season"], slots["season_ja"] = _SEASONS[(month + 1) % 12 // 3]
    return Content(wordings="month", name=slots["name"], slots=slots)


def _clock(rng: Random) -> Content:
    hour, steps = rng.randint(1, 12), rng.randint(1, 8)
    later = (hour + steps - 1) % 12 + 1
    slots = {"hour": hour, "later": later, "steps": _count(steps, "hour"), "steps_ja": steps}
    return Content(wordings="clock", name=f"{hour}/{steps}", slots=slots)


def _forecast(rng: Random) -> Content:
    form = rng.choice(("day", "city"))
    where = rng.sample(_LISTS["days" if form == "day" else "cities"], 3)
    skies = rng.sample(_LISTS["weather"], 3)
    told = [f"{sky[0]} {'on' if form == 'day' else 'in'} {place[0]}" for place, sky in zip(where, skies, strict=True)]
    told_ja = [f"{place[1]}は{sky[2]}" for place, sky in zip(where, skies, strict=True)]
    asked = rng.randrange(3)
    slots = {
        **{"told": _list(told), "told_ja": "、".join(told_ja), "place": where[asked][0], "place_ja": where[asked][1]},
        **{"sky": skies[asked][0], "sky_ja": skies[asked][2]},
    }
    return Content(wordings=f"forecast_{form}", name=f"{told}/{asked}", slots=slots)


def _where(rng: Random) -> Content:
    rows = list(zip(*(rng.sample(_LISTS[name], 3) for name in ("colours", "things", "places")), strict=True))
    things = [f"the {colour[0]} {thing[0]}" for colour, thing, _ in rows]
    things_ja = [f"{colour[1]}{thing[1]}" for colour, thing, _ in rows]
    told = [f"{thing} is {place[0]}" for thing, (_, _, place) in zip(things, rows, strict=True)]
    told_ja = [f"{thing}は{place[1]}" for thing, (_, _, place) in zip(things_ja, rows, strict=True)]
    asked = rng.randrange(3)
    slots = {
        **{"told": _list(told), "told_ja": "、".join(told_ja), "thing": things[asked], "thing_ja": things_ja[asked]},
        **{"place": rows[asked][2][0], "place_ja": rows[asked][2][1]},
    }
    return Content(wordings="where", name=f"{told}/{asked}", slots=slots)


def _category(rng: Random) -> Content:
    rows = {"animal": rng.choice(_ANIMALS), "plant": rng.choice(_LISTS["plants"]), "": rng.choice(_LISTS["things"])}
    kind, kind_ja = rng.choice((("animal", "動物"), ("plant", "植物")))
    told = rng.sample(list(rows.values()), 3)
    slots = {
        **{"told": _list([row[0] for row in told], "or"), "told_ja": "、".join(row[1] for row in told)},
        **{"one": _a(rows[kind][0]), "one_ja": rows[kind][1], "a_kind": _a(kind), "kind_ja": kind_ja},
    }
    return Content(wordings="category", name=f"{kind}/{sorted(row[0] for row in told)}", slots=slots)


def _word(rng: Random) -> Content:
    rows = [row[:2] for name in ("things", "plants", "cities", "days") for row in _LISTS[name]]
    word, word_ja = rng.choice([*rows, *(row[:2] for row in _ANIMALS), *(row[::2] for row in _LISTS["colours"])])
    return Content(wordings="word", name=word, slots={"word": word, "word_ja": word_ja})


def _scene(rng: Random, animal: Sequence[Any] | None = None) -> tuple[str, str, str]:
    """Key, English, Japanese of a sentence in which an animal does something somewhere."""
    name, name_ja = (animal or rng.choice(_LAND))[:2]
    (mood, mood_ja), (place, place_ja) = rng.choice(_LISTS["adjectives"]), rng.choice(_LISTS["places"])
    base, now, past, now_ja, past_ja, not_ja = rng.choice(_LISTS["verbs"])
    verb, verb_ja = rng.choice(((now, now_ja), (past, past_ja), (f"does not {base}", not_ja)))
    key = f"scene/{mood}/{name}/{base}/{place}"
    return key, f"The {mood} {name} {verb} {place}.", f"{mood_ja}{name_ja}は{place_ja}で{verb_ja}。"


def _translate(rng: Random) -> Content:
    key, sentence, sentence_ja = _scene(rng)
    if rng.random() < 0.3:
        (thing, thing_ja), (colour, colour_ja, _) = rng.choice(_LISTS["things"]), rng.choice(_LISTS["colours"])
        place, place_ja = rng.choice(_LISTS["places"])
        key, sentence = f"there/{colour}/{thing}/{place}", f"There is {_a(f'{colour} {thing}')} {place}."
        sentence_ja = f"{place_ja}に{colour_ja}{thing_ja}があります。"
    return Content(wordings="translate", name=key, slots={"sentence": sentence, "sentence_ja": sentence_ja})


def _scenes_text(rng: Random) -> tuple[tuple[str, ...], str, str]:
    """Keys, English, Japanese: the weather, and what one animal does. A scene is the same content in a translation."""
    animal, (_, sky, _, sky_ja) = rng.choice(_LAND), rng.choice(_LISTS["weather"])
    scenes = [_scene(rng, animal) for _ in range(2)]
    keys = tuple(f"translate/{key}" for key, _, _ in scenes)
    return (
        keys,
        f"{sky}. {' '.join(scene[1] for scene in scenes)}",
        f"{sky_ja}。{''.join(scene[2] for scene in scenes)}",
    )


def _story(rng: Random) -> Content:
    (hero, hero_ja, *_), (thing, thing_ja) = rng.choice(_LAND), rng.choice(_LISTS["things"])
    friend, friend_ja = rng.choice([row for row in _LAND if row[0] != hero])[:2]
    (time, time_ja), (_, sky, _, sky_ja) = rng.choice(_LISTS["times"]), rng.choice(_LISTS["weather"])
    (mood, mood_ja), (place, place_ja) = rng.choice(_LISTS["adjectives"]), rng.choice(_LISTS["places"])
    _, _, past, _, past_ja, _ = rng.choice(_LISTS["verbs"])
    story = (
        f"{time}, {_a(f'{mood} {hero}')} was looking for {_a(thing)}. {sky}. The {hero} met {_a(friend)} and asked: "
        f"“Where is the {thing}?” The {friend} said: “The {thing} is {place}.” The {hero} looked {place} and found "
        f"the {thing}. Then the {hero} and the {friend} {past} together."
    )
    story_ja = (
        f"{time_ja}、{mood_ja}{hero_ja}が{thing_ja}を探していました。{sky_ja}。{hero_ja}は{friend_ja}に会って、"
        f"「{thing_ja}はどこですか」と聞きました。{friend_ja}は「{thing_ja}は{place_ja}にあります」と言いました。"
        f"{hero_ja}は{place_ja}を見て、{thing_ja}を見つけました。それから、{hero_ja}と{friend_ja}はいっしょに{past_ja}。"
    )
    slots = {"hero_en": _a(hero), "hero_ja": hero_ja, "thing_en": _a(thing), "thing_ja": thing_ja}
    return Content(wordings="story", name=f"{hero}/{thing}", slots=slots | {"story": story, "story_ja": story_ja})


def _story_text(rng: Random) -> tuple[tuple[str, ...], str, str]:
    content = _story(rng)
    return (f"story/{content.name}",), content.slots["story"], content.slots["story_ja"]


def _tool(rng: Random) -> Content:
    tool, tool_ja, use, use_ja = rng.choice(_LISTS["tools"])
    slots = {"tool": tool, "tool_ja": tool_ja, "use": use, "use_ja": use_ja}
    return Content(wordings="tool", name=tool, slots=slots | {"is": "are" if tool == "scissors" else "is"})


def _dish(rng: Random) -> Content:
    dish, dish_ja, needs, needs_ja, steps, steps_ja = rng.choice(_LISTS["dishes"])
    slots = {"dish": dish, "dish_ja": dish_ja, "needs": _list(needs), "needs_ja": "と".join(needs_ja)}
    return Content(wordings="dish", name=dish, slots=slots | {"steps": steps, "steps_ja": steps_ja})


def _fact(rng: Random) -> Content:
    row = rng.choice(_LISTS["facts"])
    names = ("first", "second", "answer", "first_ja", "second_ja", "answer_ja")
    return Content(wordings="fact", name=row[0], slots=dict(zip(names, row, strict=True)))


def _greeting(rng: Random) -> Content:
    row = rng.choice(_LISTS["greetings"])
    names = ("said", "answer", "said_ja", "answer_ja")
    return Content(wordings="greeting", name=row[0], slots=dict(zip(names, row, strict=True)))


_MAKERS: dict[str, tuple[Callable[[Random], Content], float]] = {
    **{"capital": (_capital, 3), "animal": (_animal, 3), "describe": (_describe, 1.5), "larger": (_larger, 2)},
    **{"legs": (_legs, 1.5), "colour": (_colour, 1.5), "opposite": (_opposite, 1.5), "sum": (_sum, 5)},
    **{"order": (_order, 2), "number": (_number, 3), "day": (_day, 2), "month": (_month, 1.5), "clock": (_clock, 2)},
    **{"forecast": (_forecast, 3), "where": (_where, 3), "category": (_category, 1.5), "word": (_word, 3)},
    **{"translate": (_translate, 6), "story": (_story, 2), "tool": (_tool, 1.5), "dish": (_dish, 1.5)},
    **{"fact": (_fact, 1.5), "greeting": (_greeting, 0.5)},
}
"""Kind → what makes one content of it, and how often."""
