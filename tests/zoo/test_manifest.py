"""Manifests: what they may say, and what is said of those that are wrong."""

from pathlib import Path

import pytest
import torch

from fxlib.spec.inputs import BatchSpec, Tensors
from fxlib.zoo import Manifest, ManifestError, read_manifest
from fxlib.zoo.workload_table import workload_of

HUGE = ", ".join(f"a{n} = [1, 2]" for n in range(40))


def read(folder: Path, text: str) -> Manifest:
    path = folder / "zoo.toml"
    path.write_text(text)
    return read_manifest(path)


def test_defaults_hold_for_all_models_unless_a_model_says_otherwise(tmp_path: Path) -> None:
    one, two = read(
        tmp_path,
        '[defaults]\nrecipe = "training"\nbudget_s = 5\nlabels = {team = "ads"}\n'
        '[[model]]\nfactory = "m:one"\n[[model]]\nfactory = "m:two"\nrecipe = "inference"\n',
    ).entries
    assert (one.name, one.recipe, one.budget_s, one.labels) == ("one", "training", 5, {"team": "ads"})
    assert (two.name, two.recipe, two.budget_s) == ("two", "inference", 5)


def test_a_matrix_makes_an_entry_for_each_point(tmp_path: Path) -> None:
    entries = read(
        tmp_path,
        '[[model]]\nfactory = "m:cv"\nname = "{net}-{batch_size}"\nargs = {pretrained = false}\n'
        'matrix = {net = ["a", "b"], batch_size = [1, 8], recipe = ["inference"], threads = [2]}\n',
    ).entries
    assert [each.name for each in entries] == ["a-1", "a-8", "b-1", "b-8"]
    assert entries[1].arguments == {"pretrained": False, "net": "a", "batch_size": 8}
    assert (entries[1].recipe, entries[1].threads) == ("inference", 2)


def test_points_of_a_matrix_are_named_by_their_values(tmp_path: Path) -> None:
    entries = read(tmp_path, '[[model]]\nfactory = "m:cv"\nmatrix = {threads = [1, 2]}\n').entries
    assert [each.name for each in entries] == ["cv[threads=1]", "cv[threads=2]"]


def test_a_glob_makes_an_entry_for_each_file_beside_the_manifest(tmp_path: Path) -> None:
    for name in ("b.fxg", "a.fxg", "c.txt"):
        (tmp_path / name).touch()
    text = '[[model]]\nfile = "*.fxg"\nname = "saved"\nworkload = "m:step"\n'
    entries = read(tmp_path, text).entries
    assert [each.name for each in entries] == ["saved/a", "saved/b"]
    assert [each.target for each in entries] == [str(tmp_path / "a.fxg"), str(tmp_path / "b.fxg")]


TABLE = '[[model]]\nfactory = "m:f"\nworkload'
STEP = 'workload = {inputs = ["8x3"]}'
TWICE = '[[model]]\nfactory = "n:f"\nmatrix = {a = [1]}\n'


@pytest.mark.parametrize(
    "text, line, told",
    [
        ('[defualts]\nrecipe = "training"\n', 1, "Did you mean defaults?"),
        ('[[model]]\nfactory = "m:f"\nrecipee = "x"\n', 3, "[model] has no key 'recipee'. Did you mean recipe?"),
        ('[[model]]\nfactory = "m:f"\n[[model]]\nfactory = "m:g"\nbudget = 1\n', 5, "Did you mean budget_s?"),
        ('[[model]]\nfactory = "m:f"\nrecipe = "inferense"\n', 3, "inferense"),
        ('[[model]]\nfactory = "m:f"\npasses = [["dead_code", {a = 1}]]\n', 3, "dead_code"),
        ('[[model]]\nfactory = "m:f"\npasses = [3]\n', 3, "3 is no pass"),
        ('[[model]]\nfactory = "m:f"\npasses = [["dead_code", 5]]\n', 3, "['dead_code', 5] is no pass. Write"),
        ('[[model]]\nfactory = "m:f"\npasses = ["dead_code", ["fold_norms", "x"]]\n', 3, "is no pass. Write"),
        ('[[model]]\nfactory = "m:f"\nmemory_gib = 1e12\n', 3, "memory_gib is at most 1048576"),
        (f'{TABLE} = {{inputs = ["8x3"], moed = "forward"}}\n', 3, "[workload] has no key 'moed'. Did you mean mode?"),
        (f'{TABLE} = {{inputs = "8x3"}}\n', 3, "inputs is a list, not '8x3'"),
        (f'{TABLE} = {{inputs = ["8x3"], evaluation = 1}}\n', 3, "evaluation is true or false, not 1"),
        (f'{TABLE} = {{inputs = ["8x3:flaot32"]}}\n', 3, "'8x3:flaot32' is no tensor. Write sizes, a dtype"),
        (f'{TABLE} = {{inputs = ["2xfour"]}}\n', 3, "'2xfour' is no tensor"),
        (f'{TABLE}.inputs = ["8"]\nworkload.mode = "backward"\n', 4, "unknown mode 'backward'"),
        (f'{TABLE} = {{inputs = ["8"], count = 0}}\n', 3, "0 is not in 1 to 4096"),
        ('[[model]]\nfactory = "m:f"\nargs = {day = 2026-01-01}\n', 3, "a date or a time is no value here"),
        ('[[model]]\nfactory = "m"\n', 2, "'m' is not of the form pkg.mod:function"),
        ('[[model]]\nname = "a"\n', 1, "a model has one source; this one has none of factory, file, entry_point"),
        ('[[model]]\nfactory = "m:f"\nfile = "a.fxg"\n', 2, "this one has factory and file"),
        ('[[model]]\nfactory = "m:f"\nmin_gain = "5%"\n', 3, "min_gain is a number, not '5%'"),
        ('[[model]]\nfactory = "m:f"\nmin_gain = 50\n', 3, "0 to 10"),
        ('[[model]]\nfactory = "m:f"\nconfidence = true\n', 3, "not True"),
        ('[[model]]\nfactory = "m:f"\nexpect = "adopted"\n', 3, "Did you mean adopt?"),
        ('[[model]]\nfactory = "m:f"\nlabels = {team = 3}\n', 3, "the label team is text, not 3"),
        ('[[model]]\nfactory = "m:f"\nreplicas = ["a"]\n', 3, "replicas holds tables of labels, not 'a'"),
        ('[[model]]\nfactory = "m:f"\nreplicas = [{a = "1"}]\n', 3, "replicas are two or more"),
        ('[[model]]\nfactory = "m:f"\nreplicas = [{a = "1"}, {a = "1"}]\n', 3, "each of other labels"),
        ('[[model]]\nfactory = "m:f"\nreplicas = [{a = "1"}, {a = 2}]\n', 3, "the label a is text, not 2"),
        ('[[model]]\nfactory = "m:f"\nreplicas = [{a = "1"}, {"a b" = "2"}]\n', 3, "replicas 'a b' must be named"),
        ('[[model]]\nfactory = "m:f"\nmatrix = {threads = 2}\n', 3, "matrix.threads is a list of values"),
        ('[[model]]\nfactory = "m:f"\nmatrix = {threads = ["two"]}\n', 3, "threads is a whole number"),
        ('[[model]]\nfile = "a.fxg"\nmatrix = {size = [2]}\n', 3, "matrix.size would be an argument of a factory"),
        ('[[model]]\nfile = "a.fxg"\nworkload = "m:s"\nmatrix = {batch_size = [2]}\n', 4, "a function makes the work"),
        ('[[model]]\nentry_point = "a"\nmatrix = {batch_size = [2]}\n', 3, "there is no workload, in which"),
        (f'[[model]]\nfile = "a.fxg"\n{STEP}\nmatrix = {{batch_size = ["2"]}}\n', 4, "above zero, not '2'"),
        (f'[[model]]\nfile = "a.fxg"\n{STEP}\nmatrix = {{batch_size = [0]}}\n', 4, "above zero, not 0"),
        ('[[model]]\nfile = "a"\nworkload = {inputs = "8"}\nmatrix = {batch_size = [1]}\n', 3, "inputs is a list"),
        ('[[model]]\nfile = "a"\nworkload = {inputs = [""]}\nmatrix = {batch_size = [1]}\n', 4, "no input has a size"),
        ('[[model]]\nfile = "none*.fxg"\n', 2, "no file matches 'none*.fxg'"),
        ('[[model]]\nfile = "**a.fxg"\n', 2, "'**a.fxg' is no pattern of files beside the manifest"),
        ('[[model]]\nfile = "/srv/*.fxg"\n', 2, "'/srv/*.fxg' is no pattern of files beside the manifest"),
        (f'[[model]]\nfactory = "m:f"\nmatrix = {{{HUGE}}}\n', 3, "1099511627776 entries are more than 10000"),
        ('[[model]]\nfactory = "m:f"\nname = "{nett}"\nmatrix = {net = ["a"]}\n', 3, "It may hold {net}, {file}."),
        ('[[model]]\nfactory = "m:f"\nname = "{net.__class__}"\nmatrix = {net = ["a"]}\n', 3, "cannot be filled in"),
        ('[[model]]\nfactory = "m:f"\n[[model]]\nfactory = "n:f"\n', 4, "two models are called 'f'"),
        ('[[model]]\nfactory = "m:f"\n[[model]]\nfactory = "n:g"\nname = "f"\n', 5, "two models are called 'f'"),
        (f'{TWICE}[[model]]\nfactory = "m:f"\nname = "f[a=1]"\n', 6, "two models are called 'f[a=1]'"),
        (f'[[model]]\nfactory = "m:f"\nname = "f[a=1]"\n{TWICE}', 4, "two models are called 'f[a=1]'"),
        ('[model]\nfactory = "m:f"\n', 1, "Write [[model]], with two brackets."),
        ("[[model\n", None, "line 1"),
        ("", None, "it lists no model"),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_what_it_might_have_meant(
    tmp_path: Path, text: str, line: int | None, told: str
) -> None:
    with pytest.raises(ManifestError) as raised:
        read(tmp_path, text)
    where = f"{tmp_path / 'zoo.toml'}" + ("" if line is None else f":{line}")
    assert str(raised.value).startswith(where + ":")
    assert told in str(raised.value)


def test_a_table_makes_the_workload_that_it_describes() -> None:
    table = {"inputs": ["8x12:int64<30000"], "kwargs": {"mask": "8"}, "target": 8, "loss": "mse", "evaluation": True}
    made = workload_of(table)
    assert made.spec == BatchSpec(
        inputs=(Tensors(shape=(8, 12), dtype=torch.int64, low=0, high=30_000),),
        kwargs={"mask": Tensors(shape=(8,), dtype=torch.float32)},
        target=Tensors(shape=(8,), dtype=torch.float32),
    )
    assert (made.loss, [each.name for each in made.variants]) == ("mse", ["evaluation"])


@pytest.mark.parametrize("source", ['file = "*.fxg"', 'entry_point = "ranker"'])
def test_files_and_entry_points_are_measured_at_several_batch_sizes(tmp_path: Path, source: str) -> None:
    (tmp_path / "net.fxg").touch()
    step = (
        'workload = {inputs = ["8x12:int64<30000", "16x16"], kwargs = {mask = "8x12"}, target = "8:int64", count = 2}'
    )
    one, two = read(
        tmp_path, f'[[model]]\n{source}\nname = "net-{{batch_size}}"\n{step}\nmatrix = {{batch_size = [1, 64]}}\n'
    ).entries
    assert [one.name, two.name] == ["net-1", "net-64"]
    assert one.arguments == {}
    assert two.workload == {
        "inputs": ["64x12:int64<30000", "16x16"],
        "kwargs": {"mask": "64x12"},
        "target": "64:int64",
        "count": 2,
    }


@pytest.mark.parametrize("value", ["9" * 5_000, "[" * 5_000])
def test_a_value_that_python_does_not_read_is_an_error(tmp_path: Path, value: str) -> None:
    with pytest.raises(ManifestError, match=r"zoo\.toml: "):
        read(tmp_path, f"[defaults]\nbudget_s = {value}\n")


def test_a_missing_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"none\.toml: No such file"):
        read_manifest(tmp_path / "none.toml")


def test_shards_part_the_entries(tmp_path: Path) -> None:
    manifest = read(tmp_path, "".join(f'[[model]]\nfactory = "m:f{n}"\n' for n in range(7)))
    parts = [manifest.chosen(shard=(index, 3)) for index in (1, 2, 3)]
    assert sorted(each.name for part in parts for each in part) == [f"f{n}" for n in range(7)]


def test_only_takes_patterns_and_says_which_matches_nothing(tmp_path: Path) -> None:
    manifest = read(
        tmp_path, '[[model]]\nfactory = "m:cv"\nmatrix = {threads = [1, 2]}\n[[model]]\nfactory = "m:nlp"\n'
    )
    assert [each.name for each in manifest.chosen(["cv[threads=2]", "n*"])] == ["cv[threads=2]", "nlp"]
    with pytest.raises(ManifestError, match=r"no model matches 'nlq'\. Did you mean nlp?"):
        manifest.chosen(["nlq"])


def test_a_digest_changes_with_what_decides_the_answer_and_with_nothing_else(tmp_path: Path) -> None:
    def digest(line: str) -> str:
        return read(tmp_path, f'[[model]]\nfactory = "m:f"\n{line}\n').entries[0].digest

    assert digest("") != digest('replicas = [{a = "1"}, {a = "2"}]')
    assert digest("") == digest("deadline_s = 7") == digest('expect = "adopt"')
    assert len({digest(""), digest("threads = 2"), digest('recipe = "training"'), digest("args = {a = 1}")}) == 4


def test_the_manifest_of_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "zoo.md").read_text()
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "a.fxg").touch()
    entries = read(tmp_path, page.partition("```toml\n")[2].partition("```")[0]).entries
    assert [each.name for each in entries] == [
        "resnet50-1",
        "resnet50-2",
        "mobilenet_w1-1",
        "mobilenet_w1-2",
        "a",
        "ranker",
    ]


def test_a_matrix_may_vary_where_a_model_is_measured(tmp_path: Path) -> None:
    text = '[[model]]\nfactory = "m:cv"\nmatrix = {where = [{hardware = "epyc"}, {hardware = "h200"}]}\n'
    entries = read(tmp_path, text).entries
    assert [(each.name, each.where) for each in entries] == [
        ("cv[where=hardware=epyc]", {"hardware": "epyc"}),
        ("cv[where=hardware=h200]", {"hardware": "h200"}),
    ]
    assert len({each.digest for each in entries}) == 2
    with pytest.raises(ManifestError, match="where 'a b' must be named by"):
        read(tmp_path, '[[model]]\nfactory = "m:cv"\nwhere = {"a b" = "c"}\n')
