"""The settings of `skipdecode serve`, and what is refused before anything starts."""

from __future__ import annotations

import hashlib
import random
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.engine.errors import UserError
from actors.openai_requests import TEXT
from pipeline.cli.app import app
from pipeline.config.load import validated
from pipeline.config.serve import ServeConfig
from pipeline.generate.settings import fetched
from pipeline.serve import plan_server, render


def config_of(checkpoint: Path, **sections: Any) -> ServeConfig:
    model = {"path": str(checkpoint), "dtype": "float32", **sections.pop("model", {})}
    return validated(ServeConfig, {"model": model, **sections}, "serve.yaml")


def refusal(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["serve", *arguments])
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give --model CHECKPOINT"),
        (("--model", "no/such/folder"), "no such checkpoint folder"),
        (("configs/demo.yaml",), "this is a job file; answer its rows with `skipdecode run`"),
        (("{file}", "--set", "replicas.scheduler=refill"), "replicas.scheduler: a server always refills"),
        (("{file}", "--set", "schedule.speedup=0.5"), "speedup = 0.5"),
        (("{file}", "--set", "http.api_key_env=NO_SUCH_KEY"), "NO_SUCH_KEY is empty"),
        (
            ("{file}", "--set", "model.weights=int8", "--set", "replicas.gpus=1"),
            "model.weights: int8 runs only on CPUs; leave it out",
        ),
        (("{file}", "--set", "replicas.cache_bytes=99999999999999"), "do not fit in this machine's"),
        (("{file}", "--port", "{used}"), "http: cannot listen on 127.0.0.1:"),
        (("{file}", "--set", "http.host=192.0.2.1"), "change host or port"),
    ],
)
def test_refusals_are_one_line_and_name_the_key(
    checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {{path: {checkpoint}}}\n")
    with socket.create_server(("127.0.0.1", 0)) as used:
        # not a port that the system may give to a connection meanwhile
        ports = () if "--port" in arguments else ("--port", str(random.randrange(20_000, 30_000)))
        filled = [one.format(file=file, used=used.getsockname()[1]) for one in arguments]
        assert says in refusal(*filled, *ports)


def test_a_plan_holds_what_a_replica_needs_and_no_key(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "top-secret\n")
    planned = plan_server(
        config_of(checkpoint, http={"api_key_env": "MY_KEY"}, replicas={"max_batch": 7, "cache_bytes": 10**8}),
        on_this_machine=True,
    )
    assert planned.limits.key_sha256 == hashlib.sha256(b"top-secret").hexdigest()
    assert "top-secret" not in repr(planned)
    assert planned.config.served_name == checkpoint.name
    generator = fetched(planned.generator)
    assert generator["checkpoint"] == str(checkpoint.resolve())
    assert (generator["max_batch"], generator["cache_bytes"]) == (7, 10**8)
    assert generator["sampling"]["temperature"] == 1.0


@pytest.mark.parametrize(("sampling", "body", "keys"), [({}, {}, 2), ({"seed": 3}, {}, 1), ({}, {"seed": 3}, 1)])
def test_equal_seeds_of_file_or_body_give_equal_answers(checkpoint: Path, sampling: Any, body: Any, keys: int) -> None:
    model = plan_server(config_of(checkpoint, sampling=sampling), on_this_machine=False).load()
    assert len({model.call(TEXT, {"prompt": "alpha", **body}).rows[0].key for _ in range(2)}) == keys


def test_a_schedule_that_was_not_trained_is_refused_unless_allowed(checkpoint: Path, tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("skipdecode.json")
    untrained = shutil.copytree(checkpoint, tmp_path / "untrained", ignore=ignore)
    with pytest.raises(UserError, match=r"schedule\.unadapted: true"):
        plan_server(config_of(untrained, schedule={"speedup": 2, "horizon": 8}), on_this_machine=True)
    allowed = {"speedup": 2, "horizon": 8, "unadapted": True}
    assert plan_server(config_of(untrained, schedule=allowed), on_this_machine=True).schedule.speedup == 2


def test_messages_are_checked_and_rendered_by_the_sandbox(chat_checkpoint: Path, checkpoint: Path) -> None:
    from actors.engine.model.loading import load_tokenizer

    tokenizer = load_tokenizer(chat_checkpoint)
    named = [
        render(tokenizer, [{"role": role, "content": "be kind"}, {"role": "user", "content": "hi"}])
        for role in ("system", "developer")
    ]
    assert named[0] == named[1] and "be kind" in named[0][0]
    with pytest.raises(UserError, match="role 'nobody'"):
        render(tokenizer, [{"role": "nobody", "content": "x"}])
    with pytest.raises(UserError, match="no chat template"):
        render(load_tokenizer(checkpoint), [{"role": "user", "content": "hi"}])
