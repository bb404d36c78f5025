"""Planted secrets, and what a job's processes let out: secrets in files, ports open to other machines."""

from __future__ import annotations

import ipaddress
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "planted-aws-secret-key",
    "AWS_SESSION_TOKEN": "planted-aws-session-token",
    "HF_TOKEN": "planted-hub-token",
    "RAY_AUTH_TOKEN": "planted-ray-token-000000000000000000000000",
}


@contextmanager
def planted_secrets() -> Iterator[Path]:
    """Secrets in the environment; gives the folder where Ray puts its sessions. Its sockets bear no long path."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


def assert_no_secret(written: Mapping[str, bytes], ray_folder: Path) -> None:
    """In what a command wrote and printed, by name, and in what Ray wrote into its session."""
    local = [one for one in ray_folder.rglob("*") if one.is_file() and not one.is_symlink()]
    assert any("raylet" in one.name for one in local)
    files = {**written, **{str(one): one.read_bytes() for one in local}}
    found = {(one, name) for one, data in files.items() for name, secret in SECRETS.items() if secret.encode() in data}
    assert not found


def listening(process: int) -> set[tuple[str, str]]:
    """(program, address) of the ports on which a process or one below it takes connections."""
    found = set()
    try:
        whole = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    except psutil.NoSuchProcess:
        return found
    for one in whole:
        try:
            ports = [port for port in one.net_connections("inet") if port.status == psutil.CONN_LISTEN]
            found |= {(one.name(), port.laddr.ip) for port in ports}
        except psutil.Error:  # it has just ended
            continue
    return found


def loopback(address: str) -> bool:
    """IPv4 in IPv6 included, as Python 3.11 does not."""
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def assert_listens_here_alone(ports: set[tuple[str, str]]) -> None:
    """ports: what `listening` found of a command whose Ray runs."""
    assert {name for name, _ in ports} >= {"gcs_server", "raylet"}
    assert not {port for port in ports if not loopback(port[1])}
