"""A benchmark's peers fail in many ways; none of them may end the benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import contestants
import pytest
from contestants import HERE, Peer, PeerEnded
from workloads import Workload

PEER = """
import time
from peer_process import serve

def start(checkpoint, threads, max_rows):
    assert checkpoint.endswith("good"), "no such model"
    def answer(prompts, new):
        if new[0] == 13:
            raise RuntimeError("thirteen")
        if new[0] == 60:
            time.sleep(60)
        return sum(new) - (new[0] == 7)
    return answer, "1.2"

serve(start)
"""


def workload(new: int) -> Workload:
    return Workload("made up", [[4, 5], [6]], [new, 3], new)


def peer_of(folder: Path, checkpoint: str) -> Peer:
    script = folder / "peer.py"
    script.write_text(PEER)
    return Peer(sys.executable, str(script), folder / checkpoint, 1, 2, PYTHONPATH=str(HERE))


def test_a_peer_answers_again_after_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = peer_of(tmp_path, "good")
    try:
        assert peer.version == "1.2"
        first = peer.answer(workload(5))
        assert (first.tokens, first.seconds < 1) == (8, True)
        assert 2**20 < first.peak_bytes < 2**28
        with pytest.raises(PeerEnded, match="thirteen"):
            peer.answer(workload(13))
        with pytest.raises(PeerEnded, match="9 tokens, 10 were asked for"):
            peer.answer(workload(7))
        monkeypatch.setattr(contestants, "PEER_LIMIT", 1)
        with pytest.raises(PeerEnded, match="no answer in 1 s"):
            peer.answer(workload(60))
        monkeypatch.undo()
        assert peer.answer(workload(5)).tokens == 8
    finally:
        peer.close()


def test_a_peer_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerEnded, match="no such model"):
        peer_of(tmp_path, "bad")
