"""What a card's tables show: rows of finished cells, from measurements, facts and the manifest. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bundler.engines import Match
from bundler.gemma4 import Kind, make_ignore
from bundler.manifest import Manifest, SourceEntry
from bundler.markdown import cell, code, link
from bundler.measurements import Figure, Measurement, Run
from bundler.recipe_rules import is_local
from bundler.tables import Row, Table
from bundler.tables import other_drafters as find_other_drafters

LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "hi": "Hindi",
    "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "nl": "Dutch", "pl": "Polish",
    "pt": "Portuguese", "ru": "Russian", "th": "Thai", "tr": "Turkish", "uk": "Ukrainian", "vi": "Vietnamese",
    "zh": "Chinese",
}  # fmt: skip
_DASH = "\N{EN DASH}"
_TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A table as the template prints it; every cell is markdown already."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    single: bool = False
    basis: str = ""
    body: str = ""


def figure(value: Figure | None, digits: int = 1, unit: str = "") -> str:
    """41-51 %, about 39 %, 36.4; a dash where there is none."""
    if value is None:
        return _DASH
    low, high = (f"{end:.{digits}f}" for end in (value.low, value.high))
    text = low if low == high else f"{low}{_DASH}{high}"
    return ("~" if value.about else "") + text + unit


def percent(value: Figure | None) -> str:
    """A percentage, with a decimal only where it was given with one."""
    if value is None:
        return _DASH
    whole = value.low == int(value.low) and value.high == int(value.high)
    return figure(value, 0 if whole else 1, " %")


def times(value: Figure | None, digits: int = 2) -> str:
    """A multiplier."""
    return figure(value, digits, _TIMES if value else "")


def gigabytes(size_bytes: int) -> str:
    """20.4 GB, 939 MB, 560 kB: three significant digits, powers of ten."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes / 1e3:.3g} kB"


def count(number: int) -> str:
    """1,234,567."""
    return f"{number:,}"


def language(name: str | None) -> str:
    """The English name of a language code, else the code."""
    return cell(LANGUAGES.get(name or "", name or _DASH))


def references(numbers: Iterable[int]) -> str:
    """[1], [2]: links to the list of sources under the tables."""
    return ", ".join(f"[[{number}]](#sources)" for number in numbers)


def headline(table: Table, row: Row) -> dict[str, str]:
    """The finished words of one headline multiplier."""
    assert row.baseline is not None
    assert row.drafted is not None
    return {
        "multiplier": times(row.multiplier, 1),
        "language": language(row.language),
        "baseline": figure(row.baseline.figures["output_throughput"]),
        "drafted": figure(row.drafted.figures["output_throughput"]),
        "box": cell(table.run.setup.box),
        "engine": cell(f"{engine_name(table.run.setup.engine)} {table.run.setup.version}"),
        "basis": table.basis,
        "body": cell(table.body),
        "sources": references(row.sources),
    }


def engine_name(name: str) -> str:
    """An engine as it writes itself."""
    return {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}.get(name, name)


def measured_tables(tables: Iterable[Table]) -> list[View]:
    """Every table; a note that was already given is not repeated."""
    said: set[str] = set()
    made = []
    for table in tables:
        view = measured(table)
        made.append(replace(view, notes=tuple(note for note in view.notes if note not in said)))
        said |= set(view.notes)
    return made


def measured(table: Table) -> View:
    """Baseline against drafter. A column appears where any row has a figure for it."""
    single = table.rows[0].streams == 1
    tokens = {row.drafted.num_speculative_tokens for row in table.rows if row.drafted}
    columns: list[tuple[str, Callable[[Row], str]]] = []
    if not single:
        columns.append(("Streams", lambda row: str(row.streams)))
    columns.append(("Prompts", lambda row: language(row.language)))
    if len(tokens) > 1:
        columns.append(("Drafted", lambda row: str((row.drafted and row.drafted.num_speculative_tokens) or _DASH)))
    columns.append(("Baseline tok/s", lambda row: figure(_of(row.baseline, "output_throughput"))))
    columns.append(("With drafter tok/s", lambda row: figure(_of(row.drafted, "output_throughput"))))
    columns.append(("Gain", lambda row: times(row.multiplier)))
    for title, name, show in _MORE:
        if any(_of(row.drafted, name) or _of(row.baseline, name) for row in table.rows):
            columns.append((title, lambda row, name=name, show=show: _pair(row, name, show)))  # type: ignore[misc]
    columns.append(("Source", lambda row: references(row.sources)))
    return View(
        caption=_conditions(table.run, tokens),
        header=tuple(title for title, _ in columns),
        rows=tuple(tuple(show(row) for _, show in columns) for row in table.rows),
        notes=(*(cell(note) for note in table.notes), *_slower(table)),
        single=single,
        basis=table.basis,
        body=cell(table.body),
    )


def _slower(table: Table) -> list[str]:
    """Where the drafter costs more than it brings, said in words."""
    return [
        f"**Slower with the drafter:** {language(row.language)} at {row.streams} stream(s). Serve without it there."
        for row in table.rows
        if row.multiplier is not None and row.multiplier.low < 1
    ]


_MORE: tuple[tuple[str, str, Callable[[Figure | None], str]], ...] = (
    ("Acceptance rate", "acceptance_rate", percent),
    ("Acceptance length", "acceptance_length", lambda value: figure(value, 2)),
    ("TTFT ms (median)", "median_ttft_ms", lambda value: figure(value, 0)),
    ("TPOT ms (median)", "median_tpot_ms", figure),
)


def _of(run: Run | None, name: str) -> Figure | None:
    return run.figures.get(name) if run else None


def _pair(row: Row, name: str, show: Callable[[Figure | None], str]) -> str:
    """Acceptance belongs to the drafter alone; a latency is shown as baseline → drafter."""
    before, after = _of(row.baseline, name), _of(row.drafted, name)
    if name.startswith("acceptance"):
        return show(after)
    return show(after or before) if before is None or after is None else f"{show(before)} → {show(after)}"


def _conditions(run: Run, tokens: Iterable[int | None]) -> str:
    setup = run.setup
    parts = [f"{engine_name(setup.engine)} {setup.version}", setup.box]
    parts += [code(flag) for flag in setup.flags]
    parts += [code(f"{key}={value}") for key, value in sorted(setup.env.items())]
    drafted = sorted(number for number in tokens if number)
    if len(drafted) == 1:
        parts.append(f"{drafted[0]} speculative tokens")
    if setup.output_tokens is not None:
        parts.append(f"{setup.output_tokens} output tokens a request")
    if setup.temperature is not None:
        parts.append(f"temperature {setup.temperature:g}")
    if setup.prompts is not None:
        parts.append(setup.prompts)
    if setup.repeats is not None and setup.repeats > 1:
        parts.append(f"mean of {setup.repeats} runs")
    return "; ".join(part if part.startswith("`") else cell(part) for part in parts)


def other_drafters(measurements: Sequence[Measurement]) -> View | None:
    """Drafters that were tried instead of the bundle's."""
    found = find_other_drafters(measurements)
    if not found:
        return None
    rows = tuple(
        (cell(run.drafter), language(run.setup.language), percent(_of(run, "acceptance_rate")), cell(run.note or ""),
         references([number]))
        for number, _, run in found
    )  # fmt: skip
    return View(caption="", header=("Drafter", "Prompts", "Acceptance rate", "Remark", "Source"), rows=rows)


def observations(measurements: Sequence[Measurement], topics: Iterable[str]) -> View | None:
    """What was seen beside the benchmark runs, on these topics."""
    rows = tuple(
        (cell(seen.subject), f"**{cell(seen.figure)}**", cell(seen.text), references([number]))
        for number, measurement in enumerate(measurements, start=1)
        for seen in measurement.observations
        if seen.topic in topics
    )
    return View(caption="", header=("Seen", "Figure", "What it means", "Source"), rows=rows) if rows else None


def fact_sources(match: Match) -> str:
    """The sources of a fact, GitHub threads as links."""
    words = []
    for source in match.fact.source:
        thread = re.fullmatch(r"([\w.-]+)/([\w.-]+)#(\d+)", source)
        if thread:
            owner, repo, number = thread.groups()
            words.append(link(f"{repo}#{number}", f"https://github.com/{owner}/{repo}/issues/{number}"))
        else:
            words.append(cell(source))
    return ", ".join(words)


def provenance(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """(path, source and commit, sha256, what was done) of every file of body, drafter and licence."""
    rows = []
    for entry in manifest.files:
        if entry.role not in ("body", "drafter", "licence"):
            continue
        role = "drafter" if entry.role == "drafter" else "body"
        source = manifest.drafter if role == "drafter" else manifest.body
        same = any(file.sha256 == entry.sha256 for file in source.files)
        rows.append((entry.path, f"{role} {commit(source)}", entry.sha256, _done(entry.path, same)))
    return rows


def sources(manifest: Manifest) -> list[tuple[str, str, str]]:
    """(role, repo, commit) of everything that went in."""
    run = manifest.quantization.calibration
    return [
        ("body", model_link(manifest.body.model), commit(manifest.body)),
        ("drafter", model_link(manifest.drafter.model), commit(manifest.drafter)),
        ("calibration", model_link(run.dataset, "datasets/"), code((run.commit or run.sha256 or _DASH)[:12])),
    ]


_MADE = {
    "config.json": "plus `quantization_config`",
    "model.safetensors.index.json": "written here",
    "LICENSE": "the licence that its card names",
}


def _done(path: str, same: bool) -> str:
    if same:
        return "unchanged"
    if path.endswith(".safetensors"):
        return "quantized here"
    return _MADE.get(path, "made here")


def model_link(name: str, kind: str = "") -> str:
    """A Hub id as a link, a local path as code; `kind` is "datasets/" for a dataset."""
    return code(name) if is_local(name) else link(name, f"https://huggingface.co/{kind}{name}")


def commit(source: SourceEntry) -> str:
    """A source's commit, linked to its tree; a local folder is known by its files' hashes alone."""
    if source.commit is None:
        return "(local folder)"
    if is_local(source.model):
        return code(source.commit[:12])
    return link(source.commit[:12], f"https://huggingface.co/{source.model}/tree/{source.commit}")


_WHY_KEPT = {
    "lm_head": ("output head", "it is the embedding matrix itself; rounding it would also change the input"),
    "re:.*vision_tower.*": ("vision tower", "small and sensitive; engines look for its plain weights"),
    "re:.*audio_tower.*": ("audio tower", "as the vision tower"),
    "re:.*embed_vision.*": ("vision projection", "puts image features into the text space"),
    "re:.*embed_audio.*": ("audio projection", "puts audio features into the text space"),
    "re:.*vision_embedder.*": ("vision embedder", "the 12B's whole image path"),
    "re:.*router.*": ("router", "a small error sends a token to other experts"),
    "re:.*per_layer_input_gate$": ("per-layer gates", "about twice the divergence for one percent of the size"),
    "re:.*per_layer_projection$": ("per-layer projections", "as the gates"),
    "re:.*per_layer_model_projection$": ("per-layer model projection", "as the gates"),
}
_ONLY_FOR = {
    "re:.*audio_tower.*": (Kind.PER_LAYER,),
    "re:.*embed_audio.*": (Kind.PER_LAYER, Kind.UNIFIED),
    "re:.*vision_embedder.*": (Kind.UNIFIED,),
    "re:.*vision_tower.*": (Kind.DENSE, Kind.MOE, Kind.PER_LAYER),
}


def kept(kind: Kind | None, ignore: Sequence[str]) -> list[tuple[str, str, str]]:
    """(what, pattern, why) of everything that stays as the source has it."""
    patterns = make_ignore(kind, ignore) if kind else ("lm_head", *ignore)
    rows = []
    for pattern in patterns:
        if pattern in _ONLY_FOR and kind not in _ONLY_FOR[pattern]:
            continue
        what, why = _WHY_KEPT.get(pattern, ("by the recipe", "the publisher's choice"))
        rows.append((what, pattern, why))
    return rows
