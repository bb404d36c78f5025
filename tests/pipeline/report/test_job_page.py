"""The report is one small file that loads nothing and runs nothing, whatever rows, paths and configuration hold."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from part_builders import LAYERS, manifest_of, part_stats, to_table

from pipeline.commit.runs import RUNS, JobRun
from pipeline.config.job import StorageConfig
from pipeline.input.shards import Shard
from pipeline.report import job_page as pages
from pipeline.report.job_page import count, flat, job_page
from pipeline.storage.folder import Folder, open_folder, write_json

LOCAL = StorageConfig()
HOSTILE = (
    """<script>alert(1)</script>"'><img src=x onerror=alert(2)>{{ 7 * 7 }}$\\frac{1}{$ \ud800 \x00 </style></svg>"""
)
SECRET = "https://user:planted-password@host/x"
LINK = "<a href='javascript:alert(3)'>"


class Page(HTMLParser):
    """What a browser would find."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += " "
        if tag not in ("meta", "path", "use", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "path", "use", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, bytes]:
    """A folder whose name, and a job whose every text, tries to become part of the page."""
    folder = open_folder(str(tmp_path_factory.mktemp("out") / "<script>alert(0)</script>"), LOCAL)
    stored = HOSTILE.replace("\ud800", "")  # a job file with a lone surrogate is refused
    config = {"input": {"system": f"{stored} {SECRET}", LINK: LINK}}
    run = JobRun(90.0, 95.0, 9, 2.0, 130.0, 3.0, config, {"python": stored})
    write_json(folder, RUNS, [asdict(run)])
    kinds = json.dumps([[HOSTILE, 2, HOSTILE, LINK + HOSTILE]])
    shards = [
        part_stats(
            Shard(index, f"in/{HOSTILE}.parquet", 0, 5),
            node=stored,
            device=LINK,
            actor=f"{LINK}{index % 2}",
            error_kinds=kinds,
            started=100.0 + 4 * index,
            finished=104.0 + 4 * index,
        )
        for index in range(4)
    ]
    manifest = manifest_of([Shard(index, f"in/{HOSTILE}.parquet", 0, 5) for index in range(4)])
    identity = {**manifest.identity, "input": {"template": f"{SECRET} {HOSTILE}", LINK: [HOSTILE]}}
    return folder, job_page(folder, replace(manifest, identity=identity), to_table(shards), LOCAL)


def test_no_text_becomes_markup(hostile: tuple[Folder, bytes]) -> None:
    found = Page(hostile[1])
    assert found.open == []
    assert not {"script", "img", "iframe", "object", "link", "foreignobject"} & {tag for tag, _ in found.tags}
    for tag, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert attributes.get("src") is None and (attributes.get("href") or "#").startswith("#")
        assert (attributes.get("xlink:href") or "#").startswith("#")
    assert "<script>alert(1)</script>" in found.text and "{{ 7 * 7 }}" in found.text and "49" not in HOSTILE
    assert "planted-password" not in found.text and "https://***@host/x" in found.text
    assert "default-src 'none'" in str(found.of("meta"))
    assert "url(" not in re.sub(r"url\(#\w+\)", "", hostile[1].decode()) and "@import" not in hostile[1].decode()


def test_the_page_is_small_and_can_be_read_without_seeing_it(hostile: tuple[Folder, bytes]) -> None:
    assert len(hostile[1]) < 300_000
    found = Page(hostile[1])
    assert found.of("html") == [{"lang": "en"}]
    tags = [tag for tag, _ in found.tags]
    assert tags.count("h1") == 1 and tags.index("h1") < tags.index("h2")
    assert tags.count("table") == tags.count("caption") > 5
    assert all("scope" in attributes for attributes in found.of("th"))
    bars = found.of("svg")
    assert bars and all(bar["aria-hidden"] == "true" for bar in bars)  # a number stands beside each
    assert all(region["aria-label"] for region in found.of("div") if region.get("role") == "region")
    assert all(region.get("tabindex") == "0" for region in found.of("div") if region.get("role") == "region")
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = {attributes["aria-labelledby"] for attributes in found.of("section")}
    assert named <= set(ids)
    headings = re.findall(r"<h2[^>]*>([^<]*)</h2>", hostile[1].decode())
    regions = [region["aria-label"] for region in found.of("div") if region.get("role") == "region"]
    assert len({*headings, *regions}) == len(headings) + len(regions)  # landmarks are told apart


def test_the_page_tells_the_figures(hostile: tuple[Folder, bytes]) -> None:
    text = re.sub(r"\s+", " ", Page(hostile[1]).text)
    for part in (
        "Finished: all 20 rows are accounted for",
        f"mean depth 3.00 of {LAYERS}, layer ratio 1.33x",
        "nominal speed-up: 2x",
        "1 run took 40.0 s: 0.5 rows/s",
        "cost with start-up and idle: 80.0 device-seconds and money 0.2;",
        "part-000003.parquet",
    ):
        assert part in text, part


def test_numbers_are_for_people() -> None:
    shown = ["", "0", "12", "1,234,567", "3.14", "251"]
    assert [count(value) for value in (None, 0, 12, 1234567, 3.14159, 250.6)] == shown
    shown = [("a.b", "1"), ("a.c", "[1, 2]"), ("d", ""), ("e", "{}")]
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None, "e": {}}) == shown
    (long,) = flat({"system": "x" * 5000})
    assert len(long[1]) < 500 and long[1].endswith("(5,000 characters)")


def test_contrast_is_enough_in_both_colour_schemes() -> None:
    """WCAG AA: 4.5 for text, 3 for bars."""
    css = (Path(pages.__file__).parent / "page.css").read_text()
    for scheme in css.split("@media (prefers-color-scheme: dark)")[:2]:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        for name in ("text", "soft", "link", "bad"):
            assert min(contrast(colours[name], colours[behind]) for behind in ("page", "panel")) >= 4.5, name
        assert contrast(colours["c0"], colours["page"]) >= 3


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_a_page_without_times_or_answers(local: Folder) -> None:
    """An unfinished job of which all records were rebuilt, and one with nothing committed."""
    manifest = manifest_of([Shard(0, "u", 0, 5), Shard(1, "u", 5, 5)])
    rebuilt = part_stats(Shard(0, "u", 0, 5), started=0.0, finished=0.0, loaded=0.0, actor="", rebuilt=True)
    text = Page(job_page(local, manifest, to_table([rebuilt]), LOCAL)).text
    full = part_stats(Shard(0, "u", 0, 5), layer_steps=24, full_layer_steps=24)
    at_full_depth = replace(manifest, identity={"schedule": {"speedup": None, "num_layers": LAYERS}})
    told = Page(job_page(local, at_full_depth, to_table([full]), LOCAL)).text
    assert "nominal speed-up: 1x, full depth" in told and "over full depth" not in told
    assert "5 of 10 rows" in text
    assert "0 of 10 rows" in Page(job_page(local, manifest, to_table([]), LOCAL)).text


def test_the_question_of_a_long_prompt_is_shown() -> None:
    examples = [{"role": "user", "content": "an example " * 99}, {"role": "assistant", "content": "its label"}] * 6
    assert pages._text([*examples, {"role": "user", "content": "Where is it?"}]) == (
        "… 12 messages before\nuser: Where is it?"
    )
    text = pages._text("Read this. " + "a passage " * 999 + "Where is it?")
    assert text.startswith("Read this.") and text.endswith("Where is it?") and len(text) < 420
    assert pages._text("short") == "short" and pages._text(None) == ""
