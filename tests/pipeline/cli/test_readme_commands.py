"""Every command that a README shows is run by a test, here or where `RUN_BY` says, or its README says what it needs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from served import served
from shown_commands import README_FILES, ROOT, blocks, commands_of_example, run_commands

from pipeline import serve as server
from pipeline.config.serve import ServeConfig
from pipeline.plan.hardware import Hardware
from pipeline.serve import plan_server

HERE = "tests/pipeline/cli/test_readme_commands.py"
# the beginning of a command -> the test that runs it
RUN_BY = {
    "pip install dist/": "tests/test_wheel.py",
    "skipdecode demo": "tests/test_wheel.py",
    "skipdecode init": HERE,
    "skipdecode try": HERE,
    "skipdecode plan": HERE,
    "skipdecode run": HERE,
    "skipdecode report": HERE,
    "skipdecode adapt": HERE,
    "skipdecode serve": HERE,
    "curl": HERE,
    "export RAY_AUTH_MODE=token": "tests/pipeline/job/test_cluster.py",
    "ray job submit": "tests/pipeline/job/test_cluster.py",
    "prometheus": "tests/pipeline/job/test_scraped_job.py",
}
# the beginning of a command that no test runs -> what its README says that it needs
NEEDS = {
    "make real": "from PyPI",
    "docker build": "Needs Docker",
    "pip install -c constraints.txt": "Needs an AWS account",
    "ray get-auth-token": "Needs an AWS account",
    "ray up": "Needs an AWS account",
    "ray dashboard": "Needs an AWS account",
    "ray down": "Needs an AWS account",
    "kubectl": "Needs a Kubernetes cluster with KubeRay",
}


def test_every_command_is_run_or_its_readme_says_what_it_needs() -> None:
    used = set()
    for file in README_FILES:
        text = re.sub(r"\s+", " ", (ROOT / file).read_text())
        for command in (line for block in blocks(file) for line in block if not _is_output(block)):
            known = [begin for begin in {**RUN_BY, **NEEDS} if command.startswith(begin)]
            assert known, f"{file}: no test runs {command!r}, nor is it marked with what it needs"
            used.update(known)
            for begin in known:
                assert NEEDS.get(begin, "") in text, f"{file} does not say what {command!r} needs"
    assert used == {*RUN_BY, *NEEDS}
    for test in RUN_BY.values():
        assert (ROOT / test).is_file(), test


def _is_output(block: list[str]) -> bool:
    """What `make demo` prints."""
    return block[0].startswith("[")


@pytest.mark.usefixtures("in_process")
def test_a_first_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's commands as they stand; the demo's model lies where `make real-model` puts the real one."""
    [shown] = [block for block in blocks("README.md") if block[0] == "make real-model"]
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "configs" / "recipes" / "labels" / "tickets.csv", tmp_path / "my.csv")
    model = shutil.copytree(ROOT / "configs" / "demo" / "checkpoint", tmp_path / "work" / "real" / "model")
    (model / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }} {% endfor %}")
    (init,) = run_commands(shown[1:2])
    job = tmp_path / "job.yaml"
    job.write_text(job.read_text().replace("max_new_tokens: 128", "max_new_tokens: 8"))
    tried, plan, ran, report = run_commands(shown[2:])
    assert tried.count("  answer:") == 1
    assert "device-hours" in plan
    assert "16 rows in " in ran
    assert "16 rows in " in report and "0 with an error" in report
    (block,) = re.findall(r"```text\n(columns: .*?)```", (ROOT / "README.md").read_text(), re.S)
    everything = f"{init}{tried}{plan}{ran}".replace(str(tmp_path), "/home/me")
    printed = [re.sub(r"[\d,.]+", "9", line) for line in everything.splitlines()]
    assert [line for line in block.splitlines() if re.sub(r"[\d,.]+", "9", line) not in printed] == []


@pytest.mark.parametrize("example", ["README.md", "configs/serve.yaml"])
def test_a_server_answers_the_request(monkeypatch: pytest.MonkeyPatch, example: str) -> None:
    """The command's settings, without Ray Serve, which tests/pipeline/test_serve.py starts."""
    given: list[ServeConfig] = []
    monkeypatch.setattr(server, "run_server", lambda config, verbose: given.append(config))
    monkeypatch.chdir(ROOT)
    shown = [block for block in blocks("README.md") if " serve " in block[0]]
    serve, curl = shown[0] if example == "README.md" else commands_of_example("serve.yaml")
    run_commands([serve])
    _, url, header, kind, data, body = shlex.split(curl)
    assert (header, kind, data) == ("-H", "Content-Type: application/json", "-d")
    assert f"127.0.0.1:{given[0].port}" == urlsplit(url).netloc
    with served(plan_server(given[0], Hardware())) as here:
        [reply] = here.ask({"url": urlsplit(url).path, "content": body})
    assert reply.status_code == 200, reply.text
    assert "Alimentum" in reply.json()["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("example", ["README.md", "configs/adapt-demo.yaml"])
def test_adapt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str) -> None:
    """As shown, on fewer rows, two steps of training, any tolerance; then the job that it writes, as in the README."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    run_commands(["python -m pipeline.advise.demo_data work/demo/prompts --rows 80 --files 1"])
    shutil.copy(ROOT / "configs" / "demo.yaml", "job.yaml")
    shown = [block for block in blocks("README.md") if " adapt " in block[0]]
    adapt, *then = shown[0] if example == "README.md" else commands_of_example("adapt-demo.yaml")[-1:]
    training = json.dumps({"max_steps": 2, "batch_size": 4, "threads": 1})
    fewer = {"rows": "40", "held_out": "8", "speedups": "[1, 2]", "tolerance": "100", "runs": "1", "training": training}
    settings = [f"--set {shlex.quote(f'adapt.{key}={value}')}" for key, value in fewer.items()]
    said, *ran = run_commands([" ".join([adapt, *settings, "--set actors.count=1 --set output.path=answers"]), *then])
    assert "job.yaml" in said
    assert all("80 rows in " in one for one in ran)
