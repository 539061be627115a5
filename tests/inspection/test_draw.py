"""Pictures hold what is known of each node, and nothing that a browser would run."""

from __future__ import annotations

import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule
from typing_extensions import override

import fxlib
from fxlib.errors import FxlibError
from fxlib.inspection import analyze, draw, drawing

X = torch.randn(2, 3, 8, 8)
HOSTILE = "\"]; <script>alert(1)</script> <img src='https://example.com/x'> \\"


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    @override
    def handle_data(self, data: str) -> None:
        self.words.append(data)


def net() -> GraphModule:
    return fxlib.capture(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten()))


def hostile() -> GraphModule:
    module = net()
    for node in module.graph.nodes:
        node.meta["source"] = HOSTILE
        node.name = f"x{HOSTILE}"
    return module


def test_a_page_shows_shapes_time_memory_and_effects_and_needs_nothing(tmp_path: Path) -> None:
    draw(analyze(net(), [X], device="h100"), tmp_path / "net.html")
    text = (tmp_path / "net.html").read_text()
    read = Page()
    read.feed(text)
    words = " ".join(read.words)
    for told in ("float32[2, 4, 6, 6]", "15.6 kFLOP", "2 us", "KiB live", "writes the random generators"):
        assert told in words
    assert read.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert read.attributes.isdisjoint({"src", "href", "style", "onload", "onclick"})
    assert "http" not in text


def test_names_and_sources_are_text_and_no_markup() -> None:
    read = Page()
    read.feed(drawing.page(analyze(hostile(), [X])))
    assert "script" not in read.tags
    assert "img" not in read.tags
    assert any("<script>" in word for word in read.words)


def test_a_long_graph_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "MOST_NODES", 20)
    monkeypatch.setattr(drawing, "MOST_IN_DOT", 10)
    graph = Graph()
    x = graph.placeholder("x")
    for _ in range(drawing.MOST_NODES + 10):
        x = graph.call_function(torch.relu, (x,))
    graph.output(x)
    analysis = analyze(GraphModule(nn.Module(), graph), [torch.ones(1)])
    assert "12 more nodes are not drawn" in drawing.page(analysis)
    assert f"{drawing.MOST_NODES + 12 - drawing.MOST_IN_DOT} more nodes are not drawn" in drawing.dot_text(analysis)


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
@pytest.mark.parametrize("make", [net, hostile])
def test_graphviz_draws_an_svg_of_every_node(tmp_path: Path, make: object) -> None:
    analysis = analyze(make(), [X], device="h200")  # type: ignore[operator]
    draw(analysis, tmp_path / "net.svg")
    root = ET.parse(tmp_path / "net.svg").getroot()  # noqa: S314 - graphviz wrote it
    nodes = [each for each in root.iter() if each.get("class") == "node"]
    edges = [each for each in root.iter() if each.get("class") == "edge"]
    assert len(nodes) == len(analysis.nodes)
    assert len(edges) == sum(len(node.all_input_nodes) for node in analysis.nodes)
    assert not any(each.tag.endswith(("script", "image")) for each in root.iter())


def test_without_graphviz_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FxlibError, match=r"graphviz is not installed.*draw an \.html page"):
        draw(analyze(net(), [X]), tmp_path / "net.svg")


def test_another_ending_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FxlibError, match=r"nothing is drawn as '\.png'"):
        draw(analyze(net(), [X]), tmp_path / "net.png")
