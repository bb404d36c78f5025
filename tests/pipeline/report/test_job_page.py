"""The report is one small file that loads nothing and runs nothing, whatever rows, paths and configuration hold."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pytest
from part_builders import LAYERS, fake_answers, manifest_of, part_spec, part_stats, to_table

from pipeline.answer.output import part_bytes, part_table
from pipeline.commit.runs import RUNS, JobRun
from pipeline.commit.sink import part_name
from pipeline.config.job import StorageConfig
from pipeline.input.shards import Shard
from pipeline.report import job_page as pages
from pipeline.report.job_page import count, job_page
from pipeline.storage.folder import Folder, open_folder, write_json

LOCAL = StorageConfig()
HOSTILE = (
    """<script>alert(1)</script>"'><img src=x onerror=alert(2)>{{ 7 * 7 }} \ud800 \x00\x1b[2J\u202e </style></svg>"""
)
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
def hostile(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The page of a job whose every text, and whose folder's name, tries to become part of the page."""
    folder = open_folder(str(tmp_path_factory.mktemp("out") / "<script>alert(0)</script>"), LOCAL)
    write_json(folder, RUNS, [asdict(JobRun(90.0, 2.0, 130.0))])
    shards = [Shard(index, f"in/{HOSTILE}.parquet", 0, 5) for index in range(4)]
    plain = HOSTILE.replace("\ud800", "")  # Arrow cannot hold a lone surrogate; JSON escapes it
    texts = {
        "node": plain,
        "device": LINK,
        "error_kinds": json.dumps([[HOSTILE, 2, HOSTILE, LINK + HOSTILE], ["", 3, "", ""]]),
        "label_counts": json.dumps({HOSTILE: 3}),
        "common_answers": json.dumps({HOSTILE: 5}),
        "prompt_ends": json.dumps([HOSTILE]),
    }
    rows = pa.table({"id": [plain] * 5, "prompt": ["a kept column"] * 5})
    answers = [answer if answer.error else replace(answer, generated_text=plain) for answer in fake_answers(5)]
    spec, place = part_spec(keep=("prompt",)), Shard(0, "in", 0, 5)
    folder.create(part_name(0), part_bytes(part_table(rows, answers, spec, place), spec, place))
    table = to_table([part_stats(shard, cut_off=5, **texts) for shard in shards])
    manifest = manifest_of(shards)
    return job_page(folder, replace(manifest, identity={**manifest.identity, "choices": [HOSTILE, LINK]}), table)


def test_no_text_becomes_markup(hostile: bytes) -> None:
    found = Page(hostile)
    assert found.open == []
    assert not {"script", "img", "iframe", "object", "link", "a", "foreignobject"} & {tag for tag, _ in found.tags}
    for tag, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert not {"src", "href", "xlink:href"} & attributes.keys(), tag
    assert "<script>alert(1)</script>" in found.text and "{{ 7 * 7 }}" in found.text and "49" not in HOSTILE
    assert "default-src 'none'" in str(found.of("meta"))
    assert "url(" not in hostile.decode() and "@import" not in hostile.decode()


def test_control_characters_are_shown_as_escapes(hostile: bytes) -> None:
    """In prompts, answers, errors, labels and names, so that none reverses a line or reaches a terminal."""
    text = hostile.decode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    for escape in ("\\x1b[2J", "\\u202e", "\\ud800"):
        assert escape in text


def test_the_page_is_small_and_can_be_read_without_seeing_it(hostile: bytes) -> None:
    assert len(hostile) < 100_000
    found = Page(hostile)
    assert found.of("html") == [{"lang": "en"}]
    tags = [tag for tag, _ in found.tags]
    assert tags.count("h1") == 1 and tags.index("h1") < tags.index("h2")
    assert tags.count("table") == tags.count("caption") == 4
    assert all("scope" in attributes for attributes in found.of("th"))
    bars = found.of("svg")
    assert bars and all(bar["aria-hidden"] == "true" for bar in bars)  # a number stands beside each
    regions = [region for region in found.of("div") if region.get("role") == "region"]
    assert all(region["aria-label"] and region.get("tabindex") == "0" for region in regions)
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {attributes["aria-labelledby"] for attributes in found.of("section")} == set(ids)


def test_the_page_tells_the_figures(hostile: bytes) -> None:
    text = re.sub(r"\s+", " ", Page(hostile).text)
    for part in (
        "Finished: all 20 rows are accounted for",
        f"mean depth 3.00 of {LAYERS}, layer ratio 1.33x",
        "nominal speed-up: 2x",
        "1 run took 40.0 s: 0.5 rows/s",
        "cost: 80.0 device-seconds (32.0 at work) and money 0.2;",
        "part-000003.parquet",
        " 12 of other kinds ",
    ):
        assert part in text, part
    assert "a kept column" not in text  # what the model read is shown, not a column with its name


def test_numbers_are_for_people() -> None:
    shown = ["", "0", "12", "1,234,567", "3.14", "251"]
    assert [count(value) for value in (None, 0, 12, 1234567, 3.14159, 250.6)] == shown


def test_contrast_is_enough_in_both_colour_schemes() -> None:
    """WCAG AA: 4.5 for text, 3 for bars."""
    css = (Path(pages.__file__).parent / "page.css").read_text()
    for scheme in css.split("@media (prefers-color-scheme: dark)")[:2]:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        for name in ("text", "soft", "bad"):
            assert contrast(colours[name], colours["page"]) >= 4.5, name
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
    text = Page(job_page(local, manifest, to_table([rebuilt]))).text
    full = part_stats(Shard(0, "u", 0, 5), layer_steps=24, full_layer_steps=24)
    at_full_depth = replace(manifest, identity={"schedule": {"speedup": None, "num_layers": LAYERS}})
    told = Page(job_page(local, at_full_depth, to_table([full]))).text
    assert "nominal speed-up: 1x, full depth" in told and "over full depth" not in told
    assert "5 of 10 rows" in text and "First answers" not in text
    assert "0 of 10 rows" in Page(job_page(local, manifest, to_table([]))).text
