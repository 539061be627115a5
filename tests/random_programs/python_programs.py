"""Random programs of Python: models whose forwards decide by all kinds of state, and steps between which it changes.

Each program is a text, run twice: once captured and rewritten, once never captured. By hand, thousands of them:
`python -m tests.random_programs.python_programs 2000 [FIRST [export]]`. What became of them stands in
docs/explanation/guards.md.
"""

from __future__ import annotations

import collections
import linecache
import random
import re
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

import fxlib
from fxlib.errors import CaptureError, FxlibWarning
from fxlib.runtime import CapturedModule
from fxlib.spec.inputs import Batch

HEAD = """
import array, collections, contextlib, contextvars, copy, dataclasses, functools, os, sys, types
import numpy, torch
from torch import nn
from tests.random_programs.values import get, get_later, join

FACTOR, SETTINGS, SEEN, MEMO = 2.0, {"k": 2.0, "names": ["a"]}, [], {}

class Config:
    shared = 2.0
    def __init__(self): self.v, self.on = 1.5, True
    @property
    def twice(self): return self.v * 2
    def __bool__(self): return self.on
    def __getattr__(self, name):
        if name == "made": return self.v + 1
        raise AttributeError(name)

@dataclasses.dataclass
class Options:
    rate: float = 2.0
    kind: str = "a"

def counter():
    value = 2.0
    def get(): return value
    def put(new):
        nonlocal value
        value = new
    return get, put

GET, PUT = counter()

@functools.lru_cache
def cached(n): return torch.arange(4.0) * n + FACTOR * 0

def helper(x, config, scale=2.0): return x * config.v + scale

def decorate(function):
    @functools.wraps(function)
    def wrapper(*args): return function(*args) * SETTINGS["k"]
    return wrapper

@decorate
def decorated(x): return x + FACTOR

VALUE = contextvars.ContextVar("VALUE", default=2.0)

class Slots:
    __slots__ = ("v", "w")
    def __init__(self): self.v, self.w = 2.0, [1.0]

class Other(Config):
    shared = 4.0
    def times(self): return self.v * 4

class Base(nn.Module):
    basic = 2.0
    def part(self, x): return x * 2

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.power = nn.Linear(4, 4), 2
    def forward(self, x): return self.linear(x) * self.power

class Model(Base):
    level = 2.0
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.block, self.drop = Block(), nn.Dropout(0.0)
        self.register_buffer("mean", torch.ones(4))
        self.gain = nn.Parameter(torch.ones(4))
        self.n, self.flag, self.mode, self.size, self.count = 2.0, True, "n", 3, 0
        self.config, self.options = Config(), Options()
        self.items, self.table = [1.0, 2.0], {"a": 2.0}
        self.space = types.SimpleNamespace(v=2.0, deep=[{"x": 1.0}])
        self.activation = torch.tanh
        self.slots, self.user, self.rows = Slots(), collections.UserDict(a=2.0), [[1.0, 2.0], [3.0]]
        self.chain = collections.ChainMap({"a": 1.0}, self.table)
        self.array, self.numbers, self.of = array.array("d", [1.0, 2.0]), numpy.ones(3), __name__
        self.view, self.keys = types.MappingProxyType(self.table), self.table.keys()
        self.objects, self.take = {Slots()}, self.table.get
        self.partial = functools.partial(lambda x, table: x * len(table), table=self.items)
    def part(self, x): return super().part(x) + 1
    def own(self, x): return x * self.n + len(self.items)
    def forward(self, x, mask=None, *more, scale=None, **rest):
"""
READS = r"""
x = x * self.n
x = x * self.level
x = x + 1 if self.flag else x - 1
x = x * len(self.items)
for v in self.items: x = x + v
x = x * sum(self.items)
x = x + max(self.items, default=0.0)
x = x * getattr(self, self.mode)
x = x + getattr(self, "extra", 1.0)
x = x * 2 if hasattr(self, "extra") else x
x = x + self.table.get("b", 3.0)
x = -x if "b" in self.table else x
for k, v in sorted(self.table.items()): x = x + v
x = x * SETTINGS["k"]
x = x + len(SETTINGS["names"])
x = x * FACTOR
x = helper(x, self.config)
x = decorated(x)
x = x * self.config.twice
x = x * self.config.made
x = x * self.config.shared
x = x if self.config else -x
x = x * self.options.rate
x = x + 1 if self.options.kind == "a" else x
x = x * dataclasses.asdict(self.options)["rate"]
x = x * dataclasses.replace(self.options).rate
x = x * GET()
x = x + cached(self.size)
x = x + [*map(cached, [self.size])][0]
x = x * self.space.v
x = x * self.space.deep[0]["x"]
x = self.own(x)
x = self.activation(x)
x = self.block(x)
x = self.drop(x)
for layer in self.layers: x = layer(x)
x = self.layers[-1](x)
x = x * len(self.layers)
x = x * self.mean + self.gain
x = x if self.gain is None else x * self.gain
x = x * mask if mask is not None else x
x = x * scale if scale is not None else x + 1
x = x * 2 if isinstance(self.n, float) else x
x = x * 2 if isinstance(x, torch.Tensor) else x
x = x * 2 if type(self.n) is float else x
x = x * (2 if self.training else 3)
x = x * float(f"{self.size}.5")
x = x * [lambda v: v * self.n, lambda v: v + self.n][self.flag](2.0)
x = x * functools.partial(max, self.n)(1.0)
x = x * vars(self.space)["v"]
x = x * functools.reduce(lambda a, b: a + b, self.items, 1.0)
a, *b = self.items or [1.0]; x = x * a + len(b)
x = x * {"a": 1.0, **self.table}["a"]
x = x * [*self.items, 1.0][0]
x = x * next(iter(self.items), 1.0)
x = x + sum(v for v in self.items if v > self.n)
x = x + (self.items == [1.0, 2.0])
x = x * 2 if torch.is_grad_enabled() else x
x = torch.cat([x * v for v in self.items or [1.0]]).view(-1, 4)[:3]
match self.options.kind:\n    case "a": x = x + 1\n    case _: x = x - 1
match self.options:\n    case Options(rate=2.0): x = x + 1\n    case _: x = x - 1
try: x = x * self.extra\nexcept AttributeError: x = x + 1
with torch.no_grad(): y = x * self.n\nx = x + y
x = self.part(x)
x = x * super().basic
x = x * self.slots.v
x = x * copy.deepcopy(self.slots).v
x = x * copy.copy(self.slots).w[0]
x = x * self.user["a"]
x = x * self.user.get("b", 2.0)
x = -x if "b" in self.user else x
x = x * sum(self.user.values())
x = x * self.chain["a"]
x = x * self.chain.get("b", 2.0)
x = x * self.array[0]
x = x * sum(self.array)
x = x * self.view["a"]
x = x * len(self.keys)
x = x * sum(map(sum, self.rows))
x = x * [*zip(*self.rows)][0][-1]
x = x + ([3.0] in self.rows)
x = x + self.rows.count([3.0])
x = x + any(self.rows)
x = x * [each.v for each in self.objects][0]
x = x * self.take("a")
x = self.partial(x)
x = x * VALUE.get()
x = x * float(os.environ.get("FXLIB_RANDOM_PROGRAM", "2"))
x = x * 2 if isinstance(self.config, Other) else x
x = x * 2 if type(self.config) is Other else x
x = x * self.config.times() if hasattr(self.config, "times") else x
x = x * abs(self.n)
x = x + (2 if callable(self.config) else 1)
x = x + 1 if isinstance(mask, nn.Parameter) else x
x = x + 1 if hasattr(x, "tag") else x
try: x = x.view(4, 3).view(3, 4)\nexcept RuntimeError: x = x + 1
try: x = x * self.table["b"]\nexcept KeyError: x = x + 1
with contextlib.suppress(AttributeError): x = x * self.extra
x = (x, self.items)[0]
x = x * cached(self.size) * FACTOR
assert self.n is not None; x = x + 1
x = x + more[0]
x = x + torch.from_numpy(self.numbers).sum()
x = x + sum(vars(Config)[each] for each in vars(Config) if each == "shared")
x = x * __import__(self.of).FACTOR
""".strip().split("\n")
SENDS = r"""
x = x * get("h", self.items)
x = x * get("h", self.rows) + get("h", self.space)
x = x * get("h", (self.table, [self.slots]))
x = x * get("h", self.numbers)
x = x * join(get_later("h", self.config))
box = Slots(); x = x * get("h", box)
box = Slots(); box.v = self.n; x = x * get("h", [box, self.rows])
box = Slots(); x = x * get("h", box); box.v = self.n; x = x + get("h", box)
box = [self.n]; x = x * get("h", box); box.append(2.0); x = x + get("h", box)
held = numpy.ones(3); x = x * get("h", held); held[0] = self.n; x = x + get("h", held)
held = numpy.ones(3); held[0] = self.n; x = x * get("h", held)
late = [self.n]; f = get_later("h", late); late.append(1.0); x = x * join(f)
early = [get_later("h", v) for v in self.items]; x = x * sum(map(join, early)) + 1 if early else x
""".strip().split("\n")
EFFECTS = """
self.count += 1; x = x * self.count
SETTINGS["k"] += 1; x = x * SETTINGS["k"]
SEEN.append(len(SEEN)); x = x + len(SEEN)
MEMO.setdefault(self.size, x.detach()); x = x + 1
self.config.v += 1; x = x * self.config.v
Config.shared += 1; x = x * Config.shared
PUT(GET() + 1); x = x * GET()
self.items.append(1.0); x = x * len(self.items)
self.space.last = x; x = x + 1
""".strip().split("\n")
CHANGES = """
m.n = m.n + 1
m.n = int(m.n)
m.flag = not m.flag
m.items.append(3.0)
m.items.pop() if m.items else None
m.items.reverse()
m.mode = "size" if m.mode == "n" else "n"
m.extra = 4.0
m.__dict__.pop("extra", None)
m.table["b"] = 5.0
m.table.pop("b", None)
p.SETTINGS["k"] += 1
p.SETTINGS["names"].append("b")
p.FACTOR += 1
m.config.v += 1
m.config.on = not m.config.on
p.Config.shared += 1
m.config.shared = 7.0
m.options.rate += 1
m.options.kind = "b" if m.options.kind == "a" else "a"
m.options = p.Options(3.0)
p.PUT(p.GET() + 1)
m.size += 1
m.space.v += 1
m.space.deep[0]["x"] += 1
m.activation = torch.sigmoid
m.block.power += 1
m.block = p.Block()
m.layers.append(nn.Linear(4, 4))
m.layers = m.layers[:1]
m.mean.add_(1)
m.gain = nn.Parameter(torch.full((4,), 2.0))
m.gain is None or m.gain.data.add_(1)
m.gain = None
m.train(not m.training)
m.level = 5.0
p.Model.level += 1
p.helper.__defaults__ = (3.0,)
p.decorated = torch.neg
p.Model.own = lambda self, x: x - 1
m.own = lambda x: x + 9
m.register_forward_hook(lambda *a: a[2] * 2)
m.block.register_forward_hook(lambda *a: a[2] * 2)
m.half().float()
p.Base.basic += 1
p.Base.part = lambda self, x: x * 5
m.slots.v += 1
m.slots.w[0] += 1
m.user["a"] += 1
m.user["b"] = 4.0
m.chain.maps[0]["a"] += 1
m.array[0] += 1
m.table["a"] += 1
m.rows[0].append(1.0)
m.rows[1][0] += 1
next(iter(m.objects)).v += 1
m.partial.keywords["table"] = [1.0]
p.VALUE.set(p.VALUE.get() + 1)
m.config.__class__ = p.Other
p.Config.__call__ = lambda self: 1
p.helper.__code__ = (lambda x, config, scale=2.0: x - scale).__code__
p.Model.forward = lambda self, x, mask=None, *more, scale=None, **rest: x * 3
m.slots = p.Slots()
m.rows = [[2.0], [3.0]]
p.abs = lambda v: 7.0
m.numbers[0] += 1
m.numbers = m.numbers * 2
p.sys.modules[m.of] = p.types.SimpleNamespace(FACTOR=5.0)
p.get = lambda host, value: torch.tensor(3.0)
""".strip().split("\n")


def program(seed: int, *, export: bool = False) -> str:
    """Return the text of a random program; one that is exported calls no client."""
    draw = random.Random(seed)
    body = draw.choices(READS if export else READS + SENDS, k=draw.randint(2, 6))
    if draw.random() < 0.15:
        body.insert(draw.randrange(len(body)), draw.choice(EFFECTS))
    lines = [line.replace("\\n", "\n") for line in body]
    return HEAD + "\n".join(f"        {each}" for line in lines for each in line.split("\n")) + "\n        return x\n"


def loaded(text: str, name: str) -> ModuleType:
    """Return the program as a module of its own."""
    module = ModuleType(name)
    sys.modules[name] = module
    file = f"/{name}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), module.__dict__)  # noqa: S102 - made above
    return module


class Given(NamedTuple):
    """Which arguments one step has."""

    mask: bool
    scale: bool
    more: int

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return them."""
        x = torch.linspace(-1, 1, 12).view(3, 4)
        more = [torch.full((4,), float(each)) for each in range(self.more)]
        return (x, torch.full((4,), 0.5) if self.mask else None, *more), (
            {"scale": torch.tensor(2.0)} if self.scale else {}
        )


def step(run: Callable[..., Any], model: nn.Module, given: Given) -> list[Any]:
    """Return what one step computes: the result and the gradients, or the error's type."""
    model.zero_grad()
    args, kwargs = given.arguments()
    try:
        result = run(*args, **kwargs)
        if result.requires_grad:
            result.sum().backward()
    except Exception as error:  # noqa: BLE001 - both sides have to raise the same
        return [type(error).__name__, re.sub(r"0x\w+|'.*?'", "", str(error))]
    return [result.detach(), *(each.grad for each in model.parameters())]


def alike(one: list[Any], other: list[Any]) -> bool:
    """Whether two steps did the same, bit for bit."""
    same = [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=False)]
    return len(one) == len(other) and all(same)


def captured_of(model: nn.Module, seed: int, *, export: bool) -> CapturedModule:
    """Return a captured program: traced, or exported with one of the kinds of arguments."""
    if not export:
        return fxlib.capture(model)
    args, kwargs = Given(mask=seed % 4 != 0, scale=seed % 2 == 0, more=seed % 3).arguments()
    return fxlib.capture(model, sample_inputs=Batch(inputs=args, kwargs=kwargs), how="export")


def check(seed: int, *, export: bool = False) -> str:
    """Run one program for five steps, and return what became of its capture; raise where results differ."""
    text, draw = program(seed, export=export), random.Random(-seed)
    text = text.replace("        return x\n", "        return x if x.shape[0] > 1 else -x\n") if export else text
    names = [f"random_program_{seed}_{side}{export}" for side in ("captured", "plain")]
    worlds = [loaded(text, name) for name in names]
    models = []
    for world in worlds:
        torch.manual_seed(seed)
        models.append(world.Model())
    runs: list[Callable[..., Any]] = [models[0]]
    outcome = "captured"
    try:
        captured = captured_of(models[0], seed, export=export)
        runs = [captured, fxlib.optimize(captured)]
    except CaptureError as error:
        outcome = reason(error)
    for number in range(5):
        changes = draw.sample(CHANGES, k=draw.randint(0, 2)) if number else []
        given = Given(draw.random() < 0.7, draw.random() < 0.5, draw.choice([0, 0, 1, 2]))
        for change in changes:
            for world, model in zip(worlds, models, strict=True):
                torch.manual_seed(number)
                exec(change, {"m": model, "p": world, "torch": torch, "nn": nn})  # noqa: S102 - as above
        for run in runs:
            run.train(models[1].training)  # type: ignore[attr-defined]
        expected = step(models[1], models[1], given)
        for run in runs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FxlibWarning)
                found = step(run, models[0], given)
            if not alike(found, expected):
                raise AssertionError(
                    f"seed {seed}, step {number}, after {changes}:\n{text[len(HEAD) :]}\n{found}\n{expected}"
                )
    for name in names:
        del sys.modules[name]
    return outcome


def reason(error: CaptureError) -> str:
    """Return why a capture was refused, without what is of this program alone."""
    text = str(error).partition("Export: ")[2] or str(error)
    text = re.sub(r"^\S+\.py:\d+: |'.*?'|\d+", "", text)
    problem = re.split(r"(?<=[a-z)])\. [A-Z]|: (?!a traced)", text)[0]
    for kind, of_the_kind in _KINDS_OF_REASONS.items():
        if re.search(of_the_kind, problem):
            return kind
    return problem


_KINDS_OF_REASONS = {
    "the forward changes Python's state": r"the forward (changes|assigns|fills)(?!.* handed on)",
    "an object changes after it was handed on": r"handed on",
    "a traced value decides which way the program goes": r"decides which way|is iterated|length of a traced",
    "an argument is written to, and decides": r"is written to",
    "an except or a block that catches guards what is computed": r"except|suppressed",
    "a step would keep a stand-in": r"outlives",
}


if __name__ == "__main__":
    first, count = (int(sys.argv[2]) if len(sys.argv) > 2 else 0), int(sys.argv[1])
    outcomes: collections.Counter[str] = collections.Counter()
    wrong = 0
    for each in range(first, first + count):
        try:
            outcomes[check(each, export=sys.argv[3:] == ["export"])] += 1
        except AssertionError as error:
            wrong += 1
            print(error)
    print(f"{count} programs, {wrong} wrong")
    for outcome, times in outcomes.most_common():
        print(f"{times:6d} {times / count:6.1%}  {outcome}")
