"""`skipdecode` as a process that is forked from one that has imported all it needs, which takes 7 s.

python -S forked_command.py SOCKET run JOB.yaml --json
python forked_command.py SOCKET        forks for the above, until its parent ends

The command has its own arguments, environment, folder, standard files and signals, and its jobs run in its process,
without Ray. SLOW_COMMITS in its environment: seconds before each part is committed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LONGEST = 2**20  # bytes of a request


@contextmanager
def forking(path: Path) -> Iterator[tuple[str, ...]]:
    """What begins the command line of each command; the process that forks them imports meanwhile."""
    root = Path(__file__).parents[2]
    server = subprocess.Popen([sys.executable, __file__, str(path)], env={**os.environ, "PYTHONPATH": str(root)})
    try:
        yield sys.executable, "-S", __file__, str(path)
    finally:
        server.kill()
        server.wait()


def ask(path: str, arguments: list[str]) -> int:
    """Have a command run; its exit status."""
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        until = time.monotonic() + 100
        while server.connect_ex(path):  # it imports
            if time.monotonic() > until:
                sys.exit(f"{path}: nobody forks")
            time.sleep(0.1)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        child = int(server.recv(100))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(child, number))
        return int(server.recv(100) or b"1")


def serve(path: str) -> None:
    """Fork a command for each request."""
    import pandas  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import actors.engine.engine  # noqa: F401

    assert "pyiceberg" not in sys.modules  # it reads the environment
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(1)
        while os.getppid() == parent:
            with suppress(TimeoutError):
                asking, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    _answer(asking)
                asking.close()


def _answer(asking: socket.socket) -> None:
    """In a process of its own: fork the command, wait for it and report."""
    asking.setblocking(True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, files, _, _ = socket.recv_fds(asking, LONGEST, 3)
    child = os.fork()
    if child == 0:
        asking.close()
        _run(json.loads(text), files)
    asking.send(str(child).encode())
    _, status = os.waitpid(child, 0)
    with suppress(OSError):
        asking.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(request: dict[str, Any], files: list[int]) -> None:
    """In a process of its own: the command."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["skipdecode", *request["arguments"]]
    status = 1
    try:
        _command()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _command() -> None:
    from pipeline import job as jobs
    from pipeline.cli.app import main
    from pipeline.run import stages
    from pipeline.run.in_process import InProcess

    jobs.ray_backend = lambda **_: InProcess()
    if pause := float(os.environ.get("SLOW_COMMITS", "0")):
        commit = stages.commit_shard  # type: ignore[attr-defined]

        def slowly(*given: object, **named: object) -> object:
            time.sleep(pause)
            return commit(*given, **named)

        stages.commit_shard = slowly  # type: ignore[attr-defined]
    main()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
