"""The steps of a Dockerfile, without an engine: `python -m tests.deploy.image_steps DOCKERFILE PLACE ARGUMENT...`.

Each stage is an overlay over this machine's own file system, in which the steps run by `chroot`; nothing outside of
it changes, and all of it is gone with the process, which must have a mount namespace of its own (`unshare --mount`).
In the end the process becomes the last stage's entry point with the arguments. PLACE is an empty folder.

Nothing is fetched, unless FXLIB_IMAGE_ONLINE is set: `apt-get` does nothing, and `pip install` builds and installs
what was copied, while all that it needs comes from where this Python has it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

SOURCES: Final = Path(__file__).parents[2]
ONLINE: Final = "FXLIB_IMAGE_ONLINE"
_PYTHON: Final = Path(sys.executable).resolve().parent
_PATH: Final = f"{_PYTHON}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OFFLINE: Final = {
    "PIP_NO_DEPS": "1",
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip takes the option's negation for its value
    "PYTHONPATH": sysconfig.get_paths()["purelib"],
}


@dataclass(kw_only=True)
class Stage:
    """One stage: the folder of its files, and what its steps have said so far."""

    root: Path
    folder: str = "/"
    user: str = "0"
    entry_point: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, command: list[str]) -> None:
        """Run a command within; what it says goes to this process's errors.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        subprocess.run(self._within(command), check=True, env=self._variables(), stdout=sys.stderr)

    def become(self, command: list[str]) -> NoReturn:
        """Have a command within take this process's place."""
        sys.stderr.flush()
        os.execvpe("chroot", self._within(command), self._variables())  # noqa: S606 - nothing is left for a shell

    def _within(self, command: list[str]) -> list[str]:
        who = f"--userspec={self.user}:{self.user}"
        return ["chroot", who, str(self.root), "env", f"--chdir={self.folder}", *command]

    def _variables(self) -> dict[str, str]:
        offline = {} if ONLINE in os.environ else _OFFLINE
        return {"PATH": _PATH, **offline, **self.environment}

    def at(self, path: str) -> Path:
        """Return where a path of the stage is outside of it."""
        return self.root / os.path.normpath(f"{self.folder}/{path}" if path[0] != "/" else path).lstrip("/")


def main(dockerfile: Path, place: Path, command: list[str]) -> NoReturn:
    """Take all steps, and become the entry point with the arguments given.

    Raises:
        subprocess.CalledProcessError: a step failed.
        ValueError: a step is of no kind that is known here.
    """
    subprocess.run(["mount", "-t", "tmpfs", "stages", place], check=True)
    stages: dict[str, Stage] = {}
    stage = Stage(root=place)
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(str.strip, text.splitlines()):
        kind, _, rest = line.strip().partition(" ")
        if kind == "FROM":
            image, _, name = rest.partition(" AS ")
            if not image.startswith("python:3.11"):
                raise ValueError(f"this machine's Python does not stand for the image {image}")
            stage = stages[name] = begun(place / f"stage-{len(stages)}")
        else:
            take(stage, kind, rest, stages)
    stage.become([*stage.entry_point, *command])


def begun(folder: Path) -> Stage:
    """Begin a stage: an overlay over all files of this machine, where Python can be run by everybody."""
    for each in ("upper", "work", "root"):
        (folder / each).mkdir(parents=True)
    root = folder / "root"
    layers = f"lowerdir=/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, root], check=True)
    for each in ("dev", "proc"):
        subprocess.run(["mount", "--rbind", f"/{each}", root / each], check=True)
    for path in (_PYTHON, Path(sys.executable), Path(_OFFLINE["PYTHONPATH"])):
        for parent in path.parents:
            inside = root / parent.relative_to("/")
            inside.chmod(inside.stat().st_mode | 0o111)
    if ONLINE not in os.environ:
        fetches = root / "usr/local/sbin/apt-get"
        fetches.write_text("#!/bin/sh\nexit 0\n")
        fetches.chmod(0o755)
    return Stage(root=root)


def take(stage: Stage, kind: str, rest: str, stages: dict[str, Stage]) -> None:
    """Take one step."""
    if kind == "RUN":
        stage.run(["sh", "-e", "-c", rest])
    elif kind == "COPY":
        copy(stage, shlex.split(rest), stages)
    elif kind in ("ENV", "ARG"):
        known = {"PATH": _PATH} | stage.environment
        for each in shlex.split(rest):
            name, _, value = each.partition("=")
            stage.environment[name] = re.sub(r"\$(\w+)", lambda found: known[found[1]], value)
    elif kind == "WORKDIR":
        stage.folder = rest
        stage.at(".").mkdir(parents=True, exist_ok=True)
    elif kind == "USER":
        stage.user = rest
    elif kind == "ENTRYPOINT":
        stage.entry_point = json.loads(rest)
    elif kind not in ("VOLUME", "EXPOSE", "STOPSIGNAL"):
        raise ValueError(f"no step is called {kind}")


def copy(stage: Stage, words: list[str], stages: dict[str, Stage]) -> None:
    """Copy files of the sources, or of another stage: into a folder if that ends with a slash, else as it."""
    origin = stages[words.pop(0).removeprefix("--from=")] if words[0].startswith("--from=") else None
    *paths, target = words
    for each in paths:
        source = origin.at(each) if origin else SOURCES / each
        to = stage.at(target) / (source.name if target.endswith("/") else "")
        if source.is_dir():
            ignored = None if origin else shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, to, symlinks=True, ignore=ignored)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:])
