"""The public surface: what `import fxlib` gives, and what it costs."""

import subprocess
import sys
from types import ModuleType

import pytest

import fxlib
from tests.client.models import Clicks


def python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("name", fxlib.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert not isinstance(getattr(fxlib, name), ModuleType)
    assert name in dir(fxlib)


@pytest.mark.slow
def test_a_function_is_not_hidden_by_the_submodule_of_its_name() -> None:
    program = (
        "import fxlib.capture, fxlib.equivalence.verify, fxlib.capture.api; "
        "print(fxlib.capture.__name__, fxlib.verify.__name__)"
    )
    assert python(program) == "capture verify"


@pytest.mark.slow
def test_importing_the_library_does_not_load_torch() -> None:
    assert python("import sys, fxlib; print('torch' in sys.modules)") == "False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        fxlib.optimise  # noqa: B018


def test_disabled_the_library_rewrites_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fxlib.capture(Clicks())
    assert fxlib.optimize(graph) is not graph
    monkeypatch.setenv("FXLIB_DISABLE", "1")
    assert fxlib.optimize(graph) is graph
