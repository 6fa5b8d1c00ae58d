"""A corpus without end: simple, correct English and Japanese about a small world, split by what is said.

world.toml holds the facts; the functions here are the grammar. Every text has keys that name its content (not its
wording, except for facts that can only be said in a few ways), and a key belongs to one split for ever: what is held
out was never said in training, alone or inside a longer conversation.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

LANGUAGES = ("en", "ja")
SPLITS = ("train", "calibration", "heldout")
_SHARES = (86, 5, 9)  # per cent of the keys
_WORLD: dict[str, Any] = tomllib.loads((Path(__file__).parent / "world.toml").read_text(encoding="utf-8"))
_LISTS: dict[str, list[Any]] = _WORLD["lists"]
_LAND: list[Any] = _WORLD["animals"]
_ANIMALS: list[Any] = _LAND + _WORLD["water_animals"]
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text: a conversation (user and model by turns), or plain prose in a single turn."""

    language: str
    kind: str
    """The kind of its last question, or of the prose."""
    keys: tuple[str, ...]
    turns: tuple[str, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat templates take it; empty for prose."""
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(self.turns)] if self.is_chat else []

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return len(self.turns) > 1

    @property
    def has_one_answer(self) -> bool:
        """Whether the last answer is the only right one in its wording."""
        return self.is_chat and self.kind not in {"story", "greeting"}


Item = tuple[str, str, str]
"""Key, question, answer."""
Text = tuple[str, str, str]
"""Key, the text in English, the same in Japanese."""


def find_split(key: str) -> str:
    """The split that a key belongs to. Keys that begin with `closed:` are always trained on."""
    if key.startswith("closed:"):
        return "train"
    point = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100
    return SPLITS[0] if point < _SHARES[0] else SPLITS[1] if point < _SHARES[0] + _SHARES[1] else SPLITS[2]


def make_documents(split: str, seed: int, *, chat_only: bool = False) -> Iterator[Document]:
    """Documents of a split, without end, languages by turns; the same seed gives the same ones."""
    rng = Random(f"{split} {seed}")
    while True:
        for language in LANGUAGES:
            if not chat_only and rng.random() < 0.2:
                yield _prose(rng, language, split)
            else:
                yield _chat(rng, language, split)


def make_conversations(split: str, seed: int, count: int) -> list[Document]:
    """Different single-question conversations of a split, kinds spread evenly, languages by turns."""
    rng = Random(f"{split} conversations {seed}")
    kinds = [kind for kind in _MAKERS if kind != "greeting"]
    found: list[Document] = []
    seen: set[str] = set()
    for number in range(100 * count):
        if len(found) == count:
            break
        language = LANGUAGES[len(found) % 2]
        kind = kinds[(len(found) // 2 + number // (10 * count)) % len(kinds)]
        item = _draw(rng, language, kind, split)
        if item is not None and item[1] not in seen:
            seen.add(item[1])
            found.append(Document(language=language, kind=kind, keys=(item[0],), turns=item[1:]))
    return found


def _chat(rng: Random, language: str, split: str) -> Document:
    items: list[Item] = []
    wanted = rng.choice((1, 1, 1, 2, 3))
    kind = ""
    while len(items) < wanted:
        kind = rng.choices(tuple(_MAKERS), weights=[weight for _, weight in _MAKERS.values()])[0]
        item = _draw(rng, language, kind, split)
        if item is not None:
            items.append(item)
    turns = tuple(turn for _, question, answer in items for turn in (question, answer))
    return Document(language=language, kind=kind, keys=tuple(key for key, _, _ in items), turns=turns)


def _prose(rng: Random, language: str, split: str) -> Document:
    kind, make = rng.choice((("story", _story), ("scenes", _scenes), ("description", _portrait)))
    while True:
        key, english, japanese = make(rng)
        if find_split(key) == split or kind == "description":
            # A description says what many questions ask; it is prose in every split, and is not asked for by key.
            return Document(
                language=language, kind=kind, keys=(key,), turns=(japanese if language == "ja" else english,)
            ) if find_split(key) == split else _prose(rng, language, split)


def _draw(rng: Random, language: str, kind: str, split: str) -> Item | None:
    make = _MAKERS[kind][0]
    for _ in range(200):
        item = make(rng, language == "ja")
        if find_split(item[0]) == split:
            return item
    return None


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]


def _plural(noun: str) -> str:
    plurals: dict[str, str] = _WORLD["irregular_plurals"]
    return plurals.get(noun, f"{noun}es" if noun.endswith("sh") else f"{noun}s")


def _list(words: list[str], last: str) -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else words[0]


def _fact(rng: Random, kind: str, name: str, ja: bool, english: list[tuple[str, str]], japanese: list[tuple[str, str]]) -> Item:
    """A fact in one of its wordings; the first is always trained on, so that a held-out one can be known."""
    wordings = japanese if ja else english
    number = rng.randrange(len(wordings))
    key = f"{'closed:' if number == 0 else ''}{kind}/{name}/{'ja' if ja else 'en'}/{number}"
    return key, *wordings[number]


def _capital(rng: Random, ja: bool) -> Item:
    country, country_ja, city, city_ja, continent = rng.choice(_LISTS["countries"])
    continent_ja = _WORLD["continents"][continent]
    _, _, other, other_ja, _ = rng.choice([row for row in _LISTS["countries"] if row[2] != city])
    is_capital, is_capital_ja = f"The capital of {country} is {city}.", f"{country_ja}の首都は{city_ja}です。"
    return _fact(
        rng,
        "capital",
        country,
        ja,
        [
            (f"What is the capital of {country}?", is_capital),
            (f"Which city is the capital of {country}?", is_capital),
            (f"Tell me the capital of {country}.", is_capital),
            (f"{city} is the capital of which country?", f"{city} is the capital of {country}."),
            (f"Is {other} the capital of {country}?", f"No. {is_capital}"),
            (f"Is {city} the capital of {country}?", f"Yes. {is_capital}"),
            (f"Which continent is {country} in?", f"{_cap(country)} is in {continent}."),
        ],
        [
            (f"{country_ja}の首都はどこですか。", is_capital_ja),
            (f"{country_ja}の首都は何という町ですか。", is_capital_ja),
            (f"{country_ja}の首都を教えてください。", is_capital_ja),
            (f"{city_ja}はどの国の首都ですか。", f"{city_ja}は{country_ja}の首都です。"),
            (f"{country_ja}の首都は{other_ja}ですか。", f"いいえ。{is_capital_ja}"),
            (f"{country_ja}の首都は{city_ja}ですか。", f"はい。{is_capital_ja}"),
            (f"{country_ja}はどの大陸にありますか。", f"{country_ja}は{continent_ja}にあります。"),
        ],
    )


def _animal(rng: Random, ja: bool) -> Item:
    name, name_ja, group, legs, _, food, home = rng.choice(_ANIMALS)
    group_ja, food_ja, (at_home, home_ja) = _WORLD["classes"][group], _WORLD["foods"][food], _WORLD["homes"][home]
    many, one = _plural(name), _a(name)
    has_legs = f"{_cap(one)} has {_NUMBERS[legs]} legs."
    has_legs_ja = f"{name_ja}の足は{legs}本です。" if legs else f"{name_ja}に足はありません。"
    english = [
        (f"What is {one}?", f"{_cap(one)} is {_a(group)}."),
        (f"What kind of animal is {one}?", f"{_cap(one)} is {_a(group)}."),
        (f"How many legs does {one} have?", has_legs),
        (f"How many legs has {one}?", has_legs),
        (f"What do {many} eat?", f"{_cap(many)} eat {food}."),
        (f"What is the food of {many}?", f"{_cap(many)} eat {food}."),
        (f"Where do {many} live?", f"{_cap(many)} live {at_home}."),
        (f"What is the home of {many}?", f"{_cap(many)} live {at_home}."),
    ]
    japanese = [
        (f"{name_ja}とは何ですか。", f"{name_ja}は{group_ja}です。"),
        (f"{name_ja}はどんな動物ですか。", f"{name_ja}は{group_ja}です。"),
        (f"{name_ja}の足は何本ですか。", has_legs_ja),
        (f"{name_ja}には足が何本ありますか。", has_legs_ja),
        (f"{name_ja}は何を食べますか。", f"{name_ja}は{food_ja}を食べます。"),
        (f"{name_ja}の食べ物は何ですか。", f"{name_ja}は{food_ja}を食べます。"),
        (f"{name_ja}はどこに住んでいますか。", f"{name_ja}は{home_ja}に住んでいます。"),
        (f"{name_ja}のすみかはどこですか。", f"{name_ja}は{home_ja}に住んでいます。"),
    ]
    number = rng.randrange(len(english))
    key = f"{'closed:' if number % 2 == 0 else ''}animal/{name}/{'ja' if ja else 'en'}/{number}"
    return key, *(japanese if ja else english)[number]


def _portrait(rng: Random) -> Text:
    name, name_ja, group, legs, _, food, home = rng.choice(_ANIMALS)
    at_home, home_ja = _WORLD["homes"][home]
    legs_ja = f"足は{legs}本です" if legs else "足はありません"
    return (
        f"closed:portrait/{name}",
        f"{_cap(_a(name))} is {_a(group)}. It has {_NUMBERS[legs]} legs. It lives {at_home} and eats {food}.",
        f"{name_ja}は{_WORLD['classes'][group]}です。{legs_ja}。{home_ja}に住み、{_WORLD['foods'][food]}を食べます。",
    )


def _describe(rng: Random, ja: bool) -> Item:
    key, english, japanese = _portrait(rng)
    name = key.rpartition("/")[2]
    name_ja = next(row[1] for row in _ANIMALS if row[0] == name)
    many = _plural(name)
    return _fact(
        rng,
        "describe",
        name,
        ja,
        [(f"Tell me about {many}.", english), (f"Describe {_a(name)}.", english), (f"What do you know about {many}?", english)],
        [(f"{name_ja}について教えてください。", japanese), (f"{name_ja}を説明してください。", japanese), (f"{name_ja}について何を知っていますか。", japanese)],
    )


def _larger(rng: Random, ja: bool) -> Item:
    first, second = rng.sample(_ANIMALS, 2)
    while abs(first[4] - second[4]) < 2:
        first, second = rng.sample(_ANIMALS, 2)
    big, small = (first, second) if first[4] > second[4] else (second, first)
    key = f"larger/{small[0]}/{big[0]}"
    if rng.random() < 0.5:
        if ja:
            return key, f"{first[1]}と{second[1]}では、どちらが大きいですか。", f"{big[1]}のほうが{small[1]}より大きいです。"
        return key, f"Which is larger, {_a(first[0])} or {_a(second[0])}?", f"{_cap(_a(big[0]))} is larger than {_a(small[0])}."
    if ja:
        return key, f"{first[1]}と{second[1]}では、どちらが小さいですか。", f"{small[1]}のほうが{big[1]}より小さいです。"
    return key, f"Which is smaller, {_a(first[0])} or {_a(second[0])}?", f"{_cap(_a(small[0]))} is smaller than {_a(big[0])}."


def _legs(rng: Random, ja: bool) -> Item:
    name, name_ja, group, legs, size, _, _ = rng.choice([row for row in _LAND if row[3]])
    count = rng.randint(2, 9)
    key = f"legs/{name}/{count}"
    if ja:
        counter = "羽" if group == "bird" else "頭" if size >= 8 else "匹"
        return key, f"{name_ja}が{count}{counter}います。足は全部で何本ですか。", f"足は全部で{legs * count}本です。"
    return key, f"How many legs do {count} {_plural(name)} have?", f"{count} {_plural(name)} have {legs * count} legs."


def _colour(rng: Random, ja: bool) -> Item:
    thing, thing_ja, colour = rng.choice(_LISTS["coloured"])
    colour_ja = next(noun for name, _, noun in _LISTS["colours"] if name == colour)
    answer, answer_ja = f"{_cap(thing)} is {colour}.", f"{thing_ja}の色は{colour_ja}です。"
    return _fact(
        rng,
        "colour",
        thing,
        ja,
        [(f"What colour is {thing}?", answer), (f"Tell me the colour of {thing}.", answer), (f"Which colour has {thing}?", answer)],
        [(f"{thing_ja}は何色ですか。", answer_ja), (f"{thing_ja}の色を教えてください。", answer_ja), (f"{thing_ja}はどんな色ですか。", answer_ja)],
    )


def _opposite(rng: Random, ja: bool) -> Item:
    row = rng.choice(_LISTS["opposites"])
    (a, a_ja), (b, b_ja) = rng.sample([(row[0], row[1]), (row[2], row[3])], 2)
    answer, answer_ja = f"The opposite of {a} is {b}.", f"「{a_ja}」の反対は「{b_ja}」です。"
    return _fact(
        rng,
        "opposite",
        a,
        ja,
        [(f"What is the opposite of {a}?", answer), (f"Tell me the opposite of {a}.", answer), (f"Which word is the opposite of {a}?", answer)],
        [(f"「{a_ja}」の反対は何ですか。", answer_ja), (f"「{a_ja}」の反対の言葉を教えてください。", answer_ja), (f"「{a_ja}」の逆は何ですか。", answer_ja)],
    )


def _sum(rng: Random, ja: bool) -> Item:
    sign = rng.choice("++-×")
    a, b = (rng.randint(1, 9), rng.randint(1, 9)) if sign == "×" else (rng.randint(0, 20), rng.randint(0, 20))
    if sign == "-" and a < b:
        a, b = b, a
    result = a + b if sign == "+" else a - b if sign == "-" else a * b
    key = f"sum/{a}{sign}{b}"
    if ja:
        word = {"+": "たす", "-": "ひく", "×": "かける"}[sign]
        question = rng.choice((f"{a} {sign} {b}はいくつですか。", f"{a}{word}{b}はいくつですか。", f"{a} {sign} {b}を計算してください。"))
        return key, question, f"{a} {sign} {b} = {result}です。"
    word = {"+": "plus", "-": "minus", "×": "times"}[sign]
    question = rng.choice((f"What is {a} {sign} {b}?", f"How much is {a} {word} {b}?", f"Calculate {a} {sign} {b}."))
    return key, question, f"{a} {sign} {b} = {result}."


def _order(rng: Random, ja: bool) -> Item:
    numbers = rng.sample(range(1, 31), rng.choice((3, 4)))
    up = rng.random() < 0.6
    key = f"order/{sorted(numbers)}"
    if ja:
        asked, told = "、".join(map(str, numbers)), "、".join(map(str, sorted(numbers, reverse=not up)))
        return key, f"{asked}を{'小さい' if up else '大きい'}順に並べてください。", f"{told}です。"
    told = ", ".join(map(str, sorted(numbers, reverse=not up)))
    return key, f"Sort {_list([str(n) for n in numbers], 'and')} in {'ascending' if up else 'descending'} order.", f"{told}."


def _number(rng: Random, ja: bool) -> Item:
    a, b = rng.sample(range(0, 100), 2)
    form = rng.randrange(3)
    if form == 0:
        key, high = f"number/{min(a, b)}/{max(a, b)}", max(a, b)
        if ja:
            return key, f"{a}と{b}では、どちらが大きいですか。", f"{high}のほうが大きいです。"
        return key, f"Which number is larger, {a} or {b}?", f"{high} is larger."
    if form == 1:
        if ja:
            return f"after/{a}", f"{a}の次の数は何ですか。", f"{a}の次は{a + 1}です。"
        return f"after/{a}", f"Which number comes after {a}?", f"After {a} comes {a + 1}."
    start, step = rng.randint(1, 20), rng.randint(1, 5)
    row = [start + step * i for i in range(4)]
    key = f"row/{start}/{step}"
    if ja:
        return key, f"{'、'.join(map(str, row[:3]))}の次の数は何ですか。", f"次の数は{row[3]}です。"
    return key, f"What comes next: {', '.join(map(str, row[:3]))}?", f"The next number is {row[3]}."


def _day(rng: Random, ja: bool) -> Item:
    days = _LISTS["days"]
    today, steps = rng.randrange(7), rng.randint(1, 6)
    back = rng.random() < 0.4
    other = (today + (-steps if back else steps)) % 7
    key = f"day/{today}/{-steps if back else steps}"
    if ja:
        when = f"{steps}日{'前' if back else '後'}"
        past = "でしたか" if back else "ですか"
        return key, f"今日は{days[today][1]}です。{when}は何曜日{past}。", f"{when}は{days[other][1]}{'でした' if back else 'です'}。"
    many = "1 day" if steps == 1 else f"{steps} days"
    if back:
        return key, f"Today is {days[today][0]}. What day was it {many} ago?", f"{_cap(many)} ago it was {days[other][0]}."
    return key, f"Today is {days[today][0]}. What day is it in {many}?", f"In {many} it is {days[other][0]}."


def _month(rng: Random, ja: bool) -> Item:
    months = _LISTS["months"]
    i = rng.randrange(12)
    name, after, before = months[i], (i + 1) % 12, (i - 1) % 12
    length = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[i]
    season, season_ja = (("winter", "冬"), ("spring", "春"), ("summer", "夏"), ("autumn", "秋"))[(i + 1) % 12 // 3]
    form = rng.randrange(4)
    key = f"month/{i}/{form}" if rng.random() < 0.5 else f"closed:month/{i}/{form}"
    wording = 1 if key.startswith("month") else 0
    if ja:
        m = f"{i + 1}月"
        return key, *(
            ((f"{m}の次は何月ですか。", f"{m}の次に来るのは何月ですか。")[wording], f"{m}の次は{after + 1}月です。"),
            ((f"{m}の前は何月ですか。", f"{m}の前に来るのは何月ですか。")[wording], f"{m}の前は{before + 1}月です。"),
            ((f"{m}は何日ありますか。", f"{m}の日数を教えてください。")[wording], f"{m}は{length}日あります。"),
            ((f"日本の{m}はどの季節ですか。", f"日本で{m}の季節は何ですか。")[wording], f"日本の{m}は{season_ja}です。"),
        )[form]
    return key, *(
        ((f"Which month comes after {name}?", f"What month follows {name}?")[wording], f"{months[after]} comes after {name}."),
        ((f"Which month comes before {name}?", f"What month is before {name}?")[wording], f"{months[before]} comes before {name}."),
        ((f"How many days does {name} have?", f"How long is {name}?")[wording], f"{name} has {length} days."),
        ((f"In Japan, which season is {name}?", f"What season is {name} in Japan?")[wording], f"In Japan, {name} is in {season}."),
    )[form]


def _clock(rng: Random, ja: bool) -> Item:
    hour, steps = rng.randint(1, 12), rng.randint(1, 8)
    later = (hour + steps - 1) % 12 + 1
    key = f"clock/{hour}/{steps}"
    if ja:
        return key, f"今は{hour}時です。{steps}時間後は何時ですか。", f"{steps}時間後は{later}時です。"
    many = "1 hour" if steps == 1 else f"{steps} hours"
    return key, f"It is {hour} o'clock. What time is it in {many}?", f"In {many} it is {later} o'clock."


def _forecast(rng: Random, ja: bool) -> Item:
    skies = rng.sample(_LISTS["weather"], 3)
    by_city = rng.random() < 0.5
    where = rng.sample(_LISTS["cities" if by_city else "days"], 3)
    asked, backwards = rng.randrange(3), rng.random() < 0.5
    key = f"forecast/{[w[0] for w in where]}/{[s[0] for s in skies]}/{asked}"
    place, place_ja, sky, sky_ja = *where[asked], skies[asked][0], skies[asked][2]
    if ja:
        told = "、".join(f"{w[1]}は{s[2]}" for w, s in zip(where, skies, strict=True)) + "です。"
        question = f"{sky_ja}なのは{'どこ' if by_city else '何曜日'}ですか。" if backwards else f"{place_ja}の天気は何ですか。"
        return key, told + question, f"{sky_ja}なのは{place_ja}です。" if backwards else f"{place_ja}は{sky_ja}です。"
    at = "in" if by_city else "on"
    told = "It is " + _list([f"{s[0]} {at} {w[0]}" for w, s in zip(where, skies, strict=True)], "and") + "."
    question = f"{'Where' if by_city else 'When'} is it {sky}?" if backwards else f"What is the weather {at} {place}?"
    return key, f"{told} {question}", f"It is {sky} {at} {place}."


def _where(rng: Random, ja: bool) -> Item:
    things, places, colours = (rng.sample(_LISTS[name], 3) for name in ("things", "places", "colours"))
    asked, by_place = rng.randrange(3), rng.random() < 0.4
    key = f"where/{[t[0] for t in things]}/{[p[0] for p in places]}/{[c[0] for c in colours]}/{asked}"
    if ja:
        names = [f"{c[1]}{t[1]}" for c, t in zip(colours, things, strict=True)]
        told = "、".join(f"{n}は{p[1]}" for n, p in zip(names, places, strict=True)) + "にあります。"
        question = f"{places[asked][1]}には何がありますか。" if by_place else f"{names[asked]}はどこにありますか。"
        answer = f"{places[asked][1]}には{names[asked]}があります。" if by_place else f"{names[asked]}は{places[asked][1]}にあります。"
        return key, told + question, answer
    names = [f"the {c[0]} {t[0]}" for c, t in zip(colours, things, strict=True)]
    told = _cap(_list([f"{n} is {p[0]}" for n, p in zip(names, places, strict=True)], "and")) + "."
    question = f"What is {places[asked][0]}?" if by_place else f"Where is {names[asked]}?"
    return key, f"{told} {question}", f"{_cap(names[asked])} is {places[asked][0]}."


def _category(rng: Random, ja: bool) -> Item:
    rows = {
        "animal": [rng.choice(_ANIMALS)[:2], "動物"],
        "thing": [rng.choice(_LISTS["things"]), "物"],
        "plant": [rng.choice(_LISTS["plants"]), "植物"],
    }
    wanted = rng.choice(("animal", "plant"))
    order = rng.sample(list(rows), 3)
    name, name_ja = rows[wanted][0]
    key = f"category/{wanted}/{sorted(rows[kind][0][0] for kind in order)}"
    if ja:
        told = "、".join(rows[kind][0][1] for kind in order)
        return key, f"{told}の中で、{rows[wanted][1]}はどれですか。", f"{rows[wanted][1]}は{name_ja}です。"
    told = _list([rows[kind][0][0] for kind in order], "or")
    return key, f"Which of these is {_a(wanted)}: {told}?", f"{_cap(_a(name))} is {_a(wanted)}."


def _word(rng: Random, ja: bool) -> Item:
    pairs = [row[:2] for row in (*_ANIMALS, *_LISTS["things"], *_LISTS["plants"], *_LISTS["cities"], *_LISTS["days"])]
    pairs += [row[::2] for row in _LISTS["colours"]]
    word, word_ja = rng.choice(pairs)
    return _fact(
        rng,
        "word",
        word,
        ja,
        [
            (f"How do you say “{word}” in Japanese?", f"“{word}” is 「{word_ja}」 in Japanese."),
            (f"What is the Japanese word for “{word}”?", f"“{word}” is 「{word_ja}」 in Japanese."),
            (f"What does 「{word_ja}」 mean in English?", f"「{word_ja}」 means “{word}” in English."),
        ],
        [
            (f"「{word_ja}」は英語で何と言いますか。", f"「{word_ja}」は英語で“{word}”と言います。"),
            (f"「{word_ja}」を英語で言ってください。", f"「{word_ja}」は英語で“{word}”と言います。"),
            (f"“{word}”は日本語で何と言いますか。", f"“{word}”は日本語で「{word_ja}」と言います。"),
        ],
    )


def _scene(rng: Random, animal: list[Any] | None = None) -> Text:
    name, name_ja = (animal or rng.choice(_LAND))[:2]
    (mood, mood_ja), (place, place_ja) = rng.choice(_LISTS["adjectives"]), rng.choice(_LISTS["places"])
    base, now, past, now_ja, past_ja, not_ja, _ = rng.choice(_LISTS["verbs"])
    tense = rng.randrange(3)
    verb, verb_ja = ((now, now_ja), (past, past_ja), (f"does not {base}", not_ja))[tense]
    key = f"scene/{mood}/{name}/{base}/{place}"
    return key, f"The {mood} {name} {verb} {place}.", f"{mood_ja}{name_ja}は{place_ja}で{verb_ja}。"


def _translate(rng: Random, ja: bool) -> Item:
    if rng.random() < 0.3:
        thing, thing_ja = rng.choice(_LISTS["things"])
        colour, colour_ja, _ = rng.choice(_LISTS["colours"])
        place, place_ja = rng.choice(_LISTS["places"])
        key = f"there/{colour}/{thing}/{place}"
        english, japanese = f"There is {_a(f'{colour} {thing}')} {place}.", f"{place_ja}に{colour_ja}{thing_ja}があります。"
    else:
        key, english, japanese = _scene(rng)
    if ja:
        return key, f"英語に訳してください。{japanese}", english
    return key, f"Translate into Japanese: {english}", japanese


def _scenes(rng: Random) -> Text:
    animal = rng.choice(_LAND)
    _, sky, _, sky_ja = rng.choice(_LISTS["weather"])
    first, second = _scene(rng, animal), _scene(rng, animal)
    wrong = find_split(first[0]) != find_split(second[0])
    while wrong:
        second = _scene(rng, animal)
        wrong = find_split(first[0]) != find_split(second[0])
    return first[0], f"{sky}. {first[1]} {second[1]}", f"{sky_ja}。{first[2]}{second[2]}"


def _story(rng: Random, animal: list[Any] | None = None, thing: list[Any] | None = None) -> Text:
    (hero, hero_ja, *_), (thing_en, thing_ja) = animal or rng.choice(_LAND), thing or rng.choice(_LISTS["things"])
    friend, friend_ja = rng.choice([row for row in _LAND if row[0] != hero])[:2]
    (time, time_ja), (_, sky, _, sky_ja) = rng.choice(_LISTS["times"]), rng.choice(_LISTS["weather"])
    (mood, mood_ja), (place, place_ja) = rng.choice(_LISTS["adjectives"]), rng.choice(_LISTS["places"])
    _, _, past, _, past_ja, _, _ = rng.choice(_LISTS["verbs"])
    english = (
        f"{time}, {_a(f'{mood} {hero}')} was looking for {_a(thing_en)}. {sky}. The {hero} met {_a(friend)} and asked: "
        f"“Where is the {thing_en}?” The {friend} said: “The {thing_en} is {place}.” The {hero} looked {place} and "
        f"found the {thing_en}. Then the {hero} and the {friend} {past} together."
    )
    japanese = (
        f"{time_ja}、{mood_ja}{hero_ja}が{thing_ja}を探していました。{sky_ja}。{hero_ja}は{friend_ja}に会って、"
        f"「{thing_ja}はどこですか」と聞きました。{friend_ja}は「{thing_ja}は{place_ja}にあります」と言いました。"
        f"{hero_ja}は{place_ja}を見て、{thing_ja}を見つけました。それから、{hero_ja}と{friend_ja}はいっしょに{past_ja}。"
    )
    return f"story/{hero}/{thing_en}", english, japanese


def _tell(rng: Random, ja: bool) -> Item:
    animal, thing = rng.choice(_LAND), rng.choice(_LISTS["things"])
    key, english, japanese = _story(rng, animal, thing)
    if ja:
        return key, f"{animal[1]}と{thing[1]}の短い話をしてください。", japanese
    return key, f"Tell me a short story about {_a(animal[0])} and {_a(thing[0])}.", english


def _tool(rng: Random, ja: bool) -> Item:
    tool, tool_ja, use, use_ja = rng.choice(_LISTS["tools"])
    verb = "are" if tool == "scissors" else "is"
    answer, answer_ja = f"{_cap(tool)} {verb} for {use}.", f"{tool_ja}は{use_ja}ために使います。"
    return _fact(
        rng,
        "tool",
        tool,
        ja,
        [(f"What {verb} {tool} for?", answer), (f"Why do we use {tool}?", answer), (f"Tell me the use of {tool}.", answer)],
        [(f"{tool_ja}は何に使いますか。", answer_ja), (f"{tool_ja}は何のために使いますか。", answer_ja), (f"{tool_ja}の使い道を教えてください。", answer_ja)],
    )


def _dish(rng: Random, ja: bool) -> Item:
    dish, dish_ja, needs, needs_ja, steps, steps_ja = rng.choice(_LISTS["dishes"])
    need, need_ja = f"For {dish} you need {_list(needs, 'and')}.", f"{dish_ja}には{'と'.join(needs_ja)}が必要です。"
    english = [(f"How do you make {dish}?", steps), (f"Tell me how to make {dish}.", steps), (f"What do you need for {dish}?", need), (f"What is needed to make {dish}?", need)]
    japanese = [(f"{dish_ja}はどう作りますか。", steps_ja), (f"{dish_ja}の作り方を教えてください。", steps_ja), (f"{dish_ja}には何が必要ですか。", need_ja), (f"{dish_ja}の材料は何ですか。", need_ja)]
    number = rng.randrange(4)
    key = f"{'closed:' if number % 2 == 0 else ''}dish/{dish}/{'ja' if ja else 'en'}/{number}"
    return key, *(japanese if ja else english)[number]


def _science(rng: Random, ja: bool) -> Item:
    first, second, answer, first_ja, second_ja, answer_ja = rng.choice(_LISTS["facts"])
    return _fact(rng, "fact", first, ja, [(first, answer), (second, answer)], [(first_ja, answer_ja), (second_ja, answer_ja)])


def _greeting(rng: Random, ja: bool) -> Item:
    row = rng.choice(_LISTS["greetings"])
    return f"closed:greeting/{row[0]}", *(row[2:] if ja else row[:2])


_MAKERS: dict[str, tuple[Callable[[Random, bool], Item], float]] = {
    **{"capital": (_capital, 3), "animal": (_animal, 3), "describe": (_describe, 1.5), "larger": (_larger, 2)},
    **{"legs": (_legs, 1.5), "colour": (_colour, 1.5), "opposite": (_opposite, 1.5), "sum": (_sum, 5), "order": (_order, 2)},
    **{"number": (_number, 3), "day": (_day, 2), "month": (_month, 1.5), "clock": (_clock, 2), "forecast": (_forecast, 3)},
    **{"where": (_where, 3), "category": (_category, 1.5), "word": (_word, 3), "translate": (_translate, 6)},
    **{"story": (_tell, 2), "tool": (_tool, 1.5), "dish": (_dish, 1.5), "fact": (_science, 1.5), "greeting": (_greeting, 0.5)},
}
"""Kind → what makes one question of it, and how often."""
