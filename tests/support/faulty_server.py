"""``cloze serve`` whose real engine misbehaves on certain words, in one process or several:
``python -m tests.support.faulty_server FLAGS``.
"""

import sys
import threading
import time
from collections.abc import Sequence

from cloze.model_store import Bundle
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service.core import Device, RequestedPrecision
from cloze.service.engine.onnx_engine import OnnxEngine
from cloze.service.processes import engine_process
from cloze.service.processes.supervisor import supervise
from cloze.service.server.process import serve_in_one_process
from cloze.service.server.startup import begin
from cloze.service.settings import load_settings
from tests.support.vocabulary import vocabulary

FAULTS = ("moon", "river", "sun", "tree", "king", "war", "world")
WORDS = {vocabulary().index(word): word for word in FAULTS}
SLOW_S = {"moon": 0.15, "river": 1.5}


def started_line(word: str) -> str:
    """Return the line of the log that a run with a word starts with."""
    return f"a run with {word} starts"


class FaultyEngine(OnnxEngine):
    """moon: slow. river: very slow. sun: raises.
    tree: hangs. king: raises, and is broken from then on. war: ends its thread. world: is answered, and the engine is broken from then on. The log has a line when a run with one of them starts.
    """

    def __init__(self, bundle: Bundle, device: Device, precision: RequestedPrecision) -> None:
        super().__init__(bundle, device, precision)
        self._broken = False

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        words = {
            WORDS[token]
            for encoding in batch
            for token in encoding.input_ids.tolist()
            if token in WORDS
        }
        for word in words:
            sys.stderr.write(f"{started_line(word)}\n")  # at once: several threads write
            time.sleep(SLOW_S.get(word, 0))
        if "tree" in words:
            threading.Event().wait()
        if "war" in words:
            raise SystemExit
        if "king" in words or "world" in words:
            self._broken = True
        if "king" in words or "sun" in words:
            raise RuntimeError("a word this engine cannot bear")
        return super().run(batch)

    def probe(self) -> None:
        if self._broken:
            raise RuntimeError("broken")
        super().probe()


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):  # started by the supervisor
        sys.exit(engine_process.main(FaultyEngine))
    names = [name.removeprefix("--").replace("-", "_") for name in sys.argv[1::2]]
    settings = load_settings(dict(zip(names, sys.argv[2::2], strict=True)))
    if settings.frontends:
        sys.exit(supervise(settings, (sys.executable, "-m", "tests.support.faulty_server")))
    begin(settings)
    sys.exit(serve_in_one_process(settings, FaultyEngine))
