"""The zoo's benchmark: what it asks for, and how it counts what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import zoo
from fxlib.zoo.manifest import read_manifest


def test_the_manifest_has_each_model_in_inference_and_some_in_training(tmp_path: Path) -> None:
    path = tmp_path / "zoo.toml"
    path.write_text(zoo.manifest({**zoo.FAMILIES, "not_installed": ["net"]}, {**zoo.TRAINED, "not_installed": []}))
    entries = read_manifest(path).entries
    trained = [each for each in entries if each.name.endswith("/training")]
    assert {each.recipe for each in trained} == {"training"}
    assert {each.name.removesuffix("/training") for each in trained} <= {each.name for each in entries}
    assert len(entries) - len(trained) >= 55
    assert not [each.name for each in entries if each.name.startswith("not_installed")]


def row(name: str, decision: str = "", gain: float | None = None, job_id: str = "job") -> dict[str, Any]:
    return {"name": name, "decision": decision, "gain": None if gain is None else {"value": gain}, "job_id": job_id}


def test_models_are_counted_by_family_and_mode() -> None:
    rows = zoo.by_family(
        [
            row("timm/a", "adopt", 0.2),
            row("timm/b", "adopt", 0.4),
            row("timm/c", "keep_original", 0.01),
            row("timm/d", job_id=""),
            row("timm/a/training", "keep_original"),
        ]
    )
    found = {(str(each.case["mode"]), each.metric): each.value for each in rows}
    assert [found["inference", metric] for metric in ("models", "captured", "measured", "adopted")] == [4, 3, 3, 2]
    assert found["inference", "gain"] == 0.30000000000000004
    assert [found["training", metric] for metric in ("models", "captured", "measured", "adopted")] == [1, 1, 0, 0]
