"""Load test of a server on loopback: time to the first token, between tokens, throughput; beside the bulk engine.

    python tests/benchmarks/serve_load.py [--model configs/demo/checkpoint] [--clients 1,8,32] [--requests 64]
        [--tokens 48] [--through asgi,serve] [--url http://127.0.0.1:8000]

asgi: the application by uvicorn in a process of its own; serve: `skipdecode serve`, behind Ray Serve's
proxy. --url: a server that runs already, such as `vllm serve`. Clients are coroutines of this process; each sends its
next request when the last one is answered. Short prompts; answers of --tokens tokens on average, from a third to five
thirds of it.
"processor ms": of each request, by part; it holds on a busy machine too, as rates do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp
import numpy as np
import psutil

ROOT = Path(__file__).parents[2]
NAMES = ("Alimentum", "The Eagle", "Zizzi", "Blue Spice", "Giraffe", "The Mill", "Aromi", "Cocum")
FOODS = ("French", "English", "Italian", "Indian", "Fast food")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PARTS = {"ServeReplica": "replica", "ProxyActor": "proxy"}  # by a word of the command line


@dataclass
class Measured:
    """seconds: of all requests; first, between: seconds to the first token of each request, and between tokens."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def prompt(number: int) -> str:
    """Different for each request."""
    return f"name[{NAMES[number % 8]}], food[{FOODS[number % 5]}], customer rating[{number % 97} out of 97]"


def length(number: int, tokens: int) -> int:
    """New tokens of a request, `tokens` on average."""
    return tokens // 3 + number * 37 % (tokens * 4 // 3)


async def load(url: str, model: str, clients: int, requests: int, tokens: int, *, stream: bool) -> Measured:
    """All requests by so many clients at once."""
    measured, numbers = Measured(), iter(range(requests))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            new = length(number, tokens)
            body = {"model": model, "prompt": prompt(number), "max_tokens": new, "temperature": 0, "ignore_eos": True}
            began = last = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json={**body, "stream": stream}) as reply:
                assert reply.status == 200, await reply.text()
                if not stream:
                    measured.tokens += (await reply.json())["usage"]["completion_tokens"]
                    continue
                parts = 0
                async for line in reply.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.perf_counter()
                    (measured.between if parts else measured.first).append(now - (last if parts else began))
                    last, parts = now, parts + 1
                measured.tokens += new

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(600), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        measured.seconds = time.perf_counter() - began
    return measured


def bulk(checkpoint: str, requests: int, tokens: int, rows: int) -> tuple[float, float]:
    """Tokens a second, and a second of the processor, of the bulk engine with refill and as many rows in flight, in a
    process of its own."""
    code = f"""
import sys, time; sys.path.insert(0, {str(ROOT / "tests" / "benchmarks")!r})
from dataclasses import replace
from serve_load import length, prompt
from actors.generator import Generator
generator = Generator({checkpoint!r}, threads=1, max_batch={rows}, scheduler="refill", cumulative_logprob=False,
    sampling={{"ignore_eos": True}})
new = [length(number, {tokens}) for number in range({requests})]
def answer():
    prompts = [generator.builder.prompt(prompt(number)) for number in range({requests})]
    generator.answer([replace(one, sampling={{"max_new_tokens": most}}) for one, most in zip(prompts, new)])
answer()
began, worked = time.perf_counter(), time.process_time()
answer()
print(sum(new) / (time.perf_counter() - began), sum(new) / (time.process_time() - worked))
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    rate, worked = done.stdout.split()[-2:]
    return float(rate), float(worked)


ASGI = """
import sys, uvicorn
from actors.serving.http import Limits, create_app
from actors.serving.model import ServedModel
arguments = {"checkpoint": sys.argv[1], "threads": 1, "max_batch": int(sys.argv[3]), "sampling": {"temperature": 1.0}}
model = ServedModel(sys.argv[4], arguments)
uvicorn.run(create_app(model, Limits()), port=int(sys.argv[2]), log_level="warning")
"""


@contextmanager
def server(through: str, options: argparse.Namespace, rows: int) -> Iterator[tuple[str, psutil.Process]]:
    """A server for the block; gives its URL and its first process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = ["-c", ASGI, options.model, port, str(rows), options.name]
    if through != "asgi":
        command = ["-m", "pipeline", "serve", "--model", options.model, "--port", port]
        for change in (f"name={options.name}", f"replicas.max_batch={rows}", "replicas.threads=1"):
            command += ["--set", change]
    process = subprocess.Popen([sys.executable, *command], env=ENVIRONMENT, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _healthy(url):
            assert process.poll() is None, "the server has ended"
            time.sleep(0.5)
        yield url, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(180)


def _healthy(url: str) -> bool:
    try:
        return bool(urlopen(f"{url}/health", timeout=5).status == 200)
    except (URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "configs" / "demo" / "checkpoint"))
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--through", default="asgi,serve")
    parser.add_argument("--url")
    parser.add_argument("--name", default="load", help="the model's name")
    options = parser.parse_args()
    options.clients = [int(count) for count in options.clients.split(",")]
    if options.url:
        measure(options.url, options)
        return
    rows = max(options.clients)
    rate = bulk(options.model, options.requests, options.tokens, rows)
    print(
        f"bulk engine, refill, {rows} rows: {rate[0]:.0f} tokens/s, {rate[1]:.0f} a second of the processor", flush=True
    )
    for through in options.through.split(","):
        with server(through, options, rows) as (url, process):
            measure(url, options, process, through, rate)


def measure(
    url: str,
    options: argparse.Namespace,
    process: psutil.Process | None = None,
    through: str = "url",
    rate: tuple[float, float] | None = None,
) -> None:
    """Print a line of JSON for each number of clients, whole answers and streams. process, rate: of a server that was
    started here, and of the bulk engine."""
    most, tokens = max(options.clients), options.tokens
    asyncio.run(load(url, options.name, most, most, tokens, stream=False))  # warm
    for clients in options.clients:
        for stream in (False, True):
            wanted = options.requests if clients > 1 else max(8, options.requests // 8)
            before = worked(process, through)
            got = asyncio.run(load(url, options.name, clients, wanted, tokens, stream=stream))
            spent = {part: seconds - before[part] for part, seconds in worked(process, through).items()}
            speed = got.tokens / got.seconds
            line = {"through": through, "clients": clients, "stream": stream, "tokens/s": round(speed)}
            line["processor ms"] = {part: round(1000 * seconds / wanted, 2) for part, seconds in spent.items()}
            if rate:
                line["of bulk"] = round(speed / rate[0], 2)
                line["of bulk by processor"] = round(got.tokens / spent["replica"] / rate[1], 2)
            if stream:
                line["first ms"] = _percentiles(got.first)
                line["between ms"] = _percentiles(got.between)
            print(json.dumps(line), flush=True)


def worked(process: psutil.Process | None, through: str) -> Counter[str]:
    """Seconds of the processor by part of a server, `clients` being this process; of an unknown server these alone."""
    seconds = Counter({"clients": time.process_time()})
    for one in [] if process is None else [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):  # it has ended
            command, other = " ".join(one.cmdline()), "replica" if through == "asgi" else "others"
            part = next((name for word, name in PARTS.items() if word in command), other)
            seconds[part] += sum(one.cpu_times()[:2])
    return seconds


def _percentiles(seconds: list[float]) -> list[float]:
    """p50, p95, p99 in milliseconds."""
    return (1000 * np.percentile(seconds, (50, 95, 99))).round(1).tolist()


if __name__ == "__main__":
    main()
