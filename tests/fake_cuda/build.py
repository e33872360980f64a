"""Makes the libraries: `runtime.cpp`, and for everything else that the provider asks for, functions
that return 0.
"""

import re
import subprocess
from pathlib import Path

_HANDLES = ("Create", "Init")
"""How functions are called that give a handle by their first argument."""


def build(folder: Path, provider: Path, headers: Path) -> list[Path]:
    """Write ``libcudart``, ``libcublas`` and so on into a folder, under the names by which the provider needs them.

    Args:
        folder: an existing one.
        provider: ``libonnxruntime_providers_cuda.so``.
        headers: of CUDA's runtime, of the same major version.

    Raises:
        subprocess.CalledProcessError, FileNotFoundError: there is no g++, nm or readelf, or it fails.
    """
    needed = re.findall(r"\(NEEDED\).*\[(libcu.*)\]", _said("readelf", "-d", provider))
    symbols: dict[str, list[str]] = {library: [] for library in needed}
    for symbol in (
        line.split()[-1] for line in _said("nm", "-D", "--undefined-only", provider).splitlines()
    ):
        name, _, library = symbol.partition("@")
        if library in symbols:
            symbols[library].append(name)
        elif name.startswith("cu"):  # the driver's own have no version
            symbols["libcuda.so.1"].append(name)
    built = []
    for library, names in sorted(
        symbols.items(), key=lambda entry: not entry[0].startswith("libcudart")
    ):
        sources = [Path(__file__).parent / "runtime.cpp"] if library.startswith("libcudart") else []
        own = sources[0].read_text() if sources else ""
        stubs = folder / f"{library}.c"
        stubs.write_text(
            "#include <stdlib.h>\n"
            + "".join(_stub(name) for name in names if f" {name}(" not in own.replace("*", " "))
        )
        exports = folder / f"{library}.map"
        exports.write_text(f"{library} {{ global: *; }};\n")
        objects = [folder / f"{library}.{number}.o" for number in range(1 + len(sources))]
        for source, object_file in zip([stubs, *sources], objects, strict=True):
            compiler = ["gcc", "-w"] if source is stubs else ["g++", f"-I{headers}"]
            subprocess.run(
                [*compiler, "-fPIC", "-c", source, "-o", object_file],
                check=True,
                capture_output=True,
            )
        linked = [
            f"-Wl,-soname,{library}",
            f"-Wl,--version-script={exports}",
            *objects,
            "-o",
            folder / library,
        ]
        subprocess.run(["g++", "-shared", *linked], check=True, capture_output=True)
        built.append(folder / library)
    return built


def _said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _stub(name: str) -> str:
    if any(part in name for part in _HANDLES):
        return f"int {name}(void **handle) {{ *handle = malloc(1); return 0; }}\n"
    if name.endswith(("StatusName", "StatusString")):
        return f'const char *{name}(void) {{ return "fake"; }}\n'
    return f"int {name}(void) {{ return 0; }}\n"
