"""Every real recipe planned against a Hub that holds the published repositories at their real size, without weights.

What the Hub sends is counted: headers and small files, never a weight.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import replicas
from hub.server import HubServer
from published import BODIES, DRAFTERS, QAT

from bundler.build import resolve
from bundler.checkpoint import parse_header
from bundler.errors import SourceError
from bundler.findings import Severity, errors
from bundler.plan import Plan, parameters_of, weight_bytes
from bundler.recipe import load

ROOT = Path(__file__).parent.parent
README = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
REAL = {
    "31b-abliterated": (replicas.ABLITERATED, "google/gemma-4-31B-it-assistant"),
    "31b-qat": (f"google/gemma-4-31B-it{QAT}", f"google/gemma-4-31B-it{QAT}-assistant"),
    "26b-a4b-qat": (f"google/gemma-4-26B-A4B-it{QAT}", f"google/gemma-4-26B-A4B-it{QAT}-assistant"),
    "12b-qat": (f"google/gemma-4-12B-it{QAT}", f"google/gemma-4-12B-it{QAT}-assistant"),
    "e4b-qat": (f"google/gemma-4-E4B-it{QAT}", f"google/gemma-4-E4B-it{QAT}-assistant"),
}
PARAMETERS = {
    "31b-abliterated": 31_273_088_876,
    "31b-qat": 31_273_088_876,
    "26b-a4b-qat": 25_805_936_206,
    "12b-qat": 11_959_730_224,
    "e4b-qat": 7_941_101_802,
}
"""As the Hub counts them (safetensors.total): the head once, buffers too; of a quantized body weights, not scales."""
MEANT_FOR = {
    "31b-abliterated": "4 x 16 GB",
    "31b-qat": "1 x 48 GB",
    "26b-a4b-qat": "1 x 32 GB",
    "12b-qat": "1 x 24 GB",
    "e4b-qat": "1 x 16 GB",
}
"""As recipes/README.md says."""
DATASET = "HuggingFaceH4/ultrachat_200k"


@pytest.fixture(scope="session")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sparse files are; they never change."""
    return tmp_path_factory.mktemp("sparse")


def publish(server: HubServer, folder: Path, *repos: str) -> None:
    for repo in repos:
        replicas.publish(server.store, repo, folder)
    server.store.add(DATASET, {"README.md": b"---\nlicense: mit\n---\n"}, kind="dataset")


def plan_real(server: HubServer, folder: Path, name: str) -> Plan:
    publish(server, folder, *REAL[name])
    return resolve(load(ROOT / "recipes" / f"{name}.toml"), folder / "dist")


@pytest.mark.parametrize("repo", [*BODIES, *DRAFTERS])
def test_replicas_have_the_published_sizes(repo: str, sparse: Path) -> None:
    """A replica's safetensors files are as large as the published ones, to the byte, and their headers are sound."""
    weights = {name: file for name, file in replicas.make_files(repo, sparse).items() if name.endswith(".safetensors")}
    if repo in replicas.FILE_BYTES:
        assert tuple(map(len, weights.values())) == replicas.FILE_BYTES[repo]
    for name, file in weights.items():
        assert parse_header(file[:400_000], name, len(file))[0]
        assert file.path.stat().st_blocks * 512 < 1_000_000


@pytest.mark.parametrize("name", REAL)
def test_a_real_recipe_plans_without_a_byte_of_weights(name: str, server: HubServer, sparse: Path) -> None:
    """Each real recipe plans at real size without an error, through unmodified huggingface_hub, from headers alone."""
    plan = plan_real(server, sparse, name)
    assert errors(plan.findings) == []
    body, drafter = REAL[name]
    for source, repo in ((plan.body, body), (plan.drafter, drafter)):
        assert (source.model, source.commit) == (repo, server.store.repos["model", repo].head())
        assert (source.date, source.gated) == ("2026-01-01", "no")
        published = replicas.FILE_BYTES.get(repo) or replicas.FILE_BYTES.get(repo.replace(QAT, ""))
        if repo != replicas.ABLITERATED and published:
            assert weight_bytes(source) == sum(published)
    assert parameters_of(plan.body) == PARAMETERS[name]
    assert plan.layout.quantized_parameters + plan.layout.kept_parameters == PARAMETERS[name]
    assert plan.dataset_commit == server.store.repos["dataset", DATASET].head()
    assert plan.serving is not None
    fits = {str(fit.drafting.box): fit.drafting for fit in plan.serving.fits}
    assert fits[MEANT_FOR[name]].context_tokens >= plan.serving.needed_tokens
    (row,) = [line for line in README.splitlines() if line.startswith(f"| [{name}]")]
    assert f"| {MEANT_FOR[name]}" in row
    assert plan.bake is not None
    assert plan.bake.workload.missing_bytes > 10**9

    storage = [entry for entry in server.log if entry.path.startswith("/_lfs/")]
    assert storage, "headers come from the storage host"
    assert all(entry.range is not None for entry in storage), "no whole file was asked for"
    assert sum(entry.sent_bytes for entry in storage) < 500_000
    assert sum(entry.sent_bytes for entry in server.log) < 1_500_000
    assert len(server.log) < 80
    assert server.writes() == []


def test_the_seeds_bundle_on_its_box(server: HubServer, sparse: Path) -> None:
    """The abliterated 31B on 4 x 16 GB has the 17,385 tokens that were measured, and room for a context of 16,384."""
    plan = plan_real(server, sparse, "31b-abliterated")
    assert plan.serving is not None
    (fit,) = [fit.drafting for fit in plan.serving.fits if str(fit.drafting.box) == "4 x 16 GB"]
    assert fit.kv_tokens == 17_385
    assert fit.context_tokens > plan.serving.needed_tokens == 16_384
    assert [f.severity for f in plan.findings if f.code == "drafter-not-qat"] == []


def test_the_qat_drafter_is_looked_for(server: HubServer, sparse: Path) -> None:
    """Once the Hub has the QAT drafter of a QAT body, a recipe with the plain one is told of it."""
    publish(server, sparse, f"google/gemma-4-31B-it{QAT}-assistant")
    plan = plan_real(server, sparse, "31b-abliterated")
    (finding,) = [f for f in plan.findings if f.code == "drafter-not-qat"]
    assert finding.severity is Severity.WARNING
    assert f"google/gemma-4-31B-it{QAT}-assistant" in str(finding.hint)


def test_a_gated_source_is_refused_before_anything(server: HubServer, sparse: Path) -> None:
    """A body whose terms nobody accepted is a SourceError that says where to accept them."""
    publish(server, sparse, *REAL["e4b-qat"])
    server.store.repos["model", REAL["e4b-qat"][0]].gated = "manual"
    with pytest.raises(SourceError, match="is gated") as caught:
        resolve(load(ROOT / "recipes" / "e4b-qat.toml"))
    assert "accept its terms" in str(caught.value.hint)


def test_gating_is_shown_where_it_was_passed(server: HubServer, sparse: Path) -> None:
    """A gated source that this account may read says how it is gated."""
    publish(server, sparse, *REAL["e4b-qat"])
    repo = server.store.repos["model", REAL["e4b-qat"][0]]
    repo.gated, repo.granted = "auto", {"alice"}
    assert resolve(load(ROOT / "recipes" / "e4b-qat.toml")).body.gated == "auto"


def test_the_command_plans_without_torch(server: HubServer, sparse: Path) -> None:
    """`bundle plan --json`, with a target and a change, prints one document and never imports torch."""
    publish(server, sparse, *REAL["31b-abliterated"])
    code = (
        "import sys; from bundler.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'transformers', 'datasets'} & sys.modules.keys()"
    )
    recipe = str(ROOT / "recipes" / "31b-abliterated.toml")
    options = ["--json", "--target", "2x16GB", "--set", "serve.tensor_parallel_size=2"]
    done = subprocess.run([sys.executable, "-c", code, "plan", recipe, *options], capture_output=True, text=True)
    document = json.loads(done.stdout)
    assert done.returncode == 5
    assert "target-too-small" in done.stderr
    assert document["serve"]["tensor_parallel_size"] == 2
    assert document["serving"]["target"]["drafting"]["kv_bytes"] < 0
    assert document["serving"]["target"]["drafting"]["context_tokens"] == 0
    assert document["bake"]["peak_bytes"] > 10**9
