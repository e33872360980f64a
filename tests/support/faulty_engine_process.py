"""``cloze serve`` with several processes, the engine's as faulty as `tests.support.faulty_server`'s:
``python -m tests.support.faulty_engine_process``.
"""

import sys

from cloze.service.processes import engine_process
from cloze.service.processes.supervisor import supervise
from cloze.service.settings import load_settings
from tests.support.faulty_server import FaultyEngine

if __name__ == "__main__":
    if sys.argv[1].startswith("{"):  # started by the supervisor
        sys.exit(engine_process.main(FaultyEngine))
    names = [name.removeprefix("--").replace("-", "_") for name in sys.argv[1::2]]
    settings = load_settings(dict(zip(names, sys.argv[2::2], strict=True)))
    sys.exit(supervise(settings, (sys.executable, "-m", "tests.support.faulty_engine_process")))
