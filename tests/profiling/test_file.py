"""A profile as a file: small, whole, and refused where it is none."""

from pathlib import Path

import pytest
from hypothesis import given, settings

import fxlib
from fxlib.errors import LimitError, WireError
from fxlib.profiling import file
from fxlib.serialization.files import digest_of
from fxlib.spec.profile import NodeProfile, Profile
from tests.protocol import strategies as some


@pytest.mark.slow
@settings(max_examples=30)
@given(some.profiles)
def test_what_is_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    path = tmp_path_factory.mktemp("profiles") / "job.fxp"
    fxlib.save_profile(profile, path)
    assert fxlib.load_profile(path) == profile
    assert [each.name for each in path.parent.iterdir()] == ["job.fxp"]


def test_a_thousand_nodes_take_a_few_tens_of_kilobytes(tmp_path: Path) -> None:
    nodes = tuple(NodeProfile(node=f"layers_{i}_linear", seconds=1e-5, output_bytes=1 << 20) for i in range(1_000))
    fxlib.save_profile(Profile(nodes=nodes), tmp_path / "job.fxp")
    assert (tmp_path / "job.fxp").stat().st_size < 50_000


@pytest.mark.parametrize("content", [b"", b"not a profile", b"\x93FXG\r\n\x1a\n", b"\x80\x04\x95pickle"])
def test_a_file_with_another_mark_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.fxp").write_bytes(content)
    with pytest.raises(WireError, match="does not begin like one"):
        fxlib.load_profile(tmp_path / "job.fxp")


def test_a_file_that_is_cut_off_or_no_message_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.fxp"
    fxlib.save_profile(Profile(nodes=(NodeProfile(node="add", seconds=1.0, output_bytes=1),)), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WireError, match="does not match its digest"):
        fxlib.load_profile(path)
    message = b"\xff" * 40
    path.write_bytes(file.MARK + digest_of(message) + message)
    with pytest.raises(WireError, match="does not hold a profile"):
        fxlib.load_profile(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "MAX_BYTES", 10)
    (tmp_path / "job.fxp").write_bytes(file.MARK + bytes(32 + 11))
    with pytest.raises(LimitError, match="more than 10 bytes"):
        fxlib.load_profile(tmp_path / "job.fxp")


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-folder"):
        fxlib.save_profile(Profile(), tmp_path / "no-such-folder" / "job.fxp")
    assert list(tmp_path.iterdir()) == []
