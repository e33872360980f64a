"""Servers and libraries in common use today, measured beside ours: a module and a row for each."""

from cloze.bench.peers import infinity, pipeline, sentence_transformers_peer, tei
from cloze.bench.peers.peer import Peer

PEERS: tuple[Peer, ...] = (
    tei.PEER,
    infinity.PEER,
    sentence_transformers_peer.PEER,
    pipeline.PEER,
)
"""In the order of the tables."""
