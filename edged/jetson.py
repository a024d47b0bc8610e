"""What a Jetson says of itself, read from its system files: board, release, power mode, clocks, temperatures, power.

Nothing here starts a process, needs root or changes a setting, and nothing raises: a file that is missing, garbled or
closed to this user leaves its field empty. Every reader takes the root of the file system, so that recorded trees can
be read in tests.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30
_READ_LIMIT = 64 * 1024
_NUMBER = re.compile(r"[-+]?[0-9]{1,15}")
_THROTTLE_FLOOR = 85.0
"""A passive trip point below this (hot-surface-alert, near 70 °C) warns of a hot case and slows nothing."""
_SANE_CELSIUS = (-60.0, 200.0)
_MODULES = {
    "p3701-0000": "AGX Orin 64GB",
    "p3701-0004": "AGX Orin 32GB",
    "p3701-0005": "AGX Orin 64GB",
    "p3701-0008": "AGX Orin Industrial 64GB",
    "p3767-0000": "Orin NX 16GB",
    "p3767-0001": "Orin NX 8GB",
    "p3767-0003": "Orin Nano 8GB",
    "p3767-0004": "Orin Nano 4GB",
    "p3767-0005": "Orin Nano 8GB",
}
_JETPACKS = (
    ((36, 3), "6.0"),
    ((36, 4, 3), "6.2"),
    ((36, 4, 4), "6.2.1"),
    ((36, 4, 7), "6.2.1"),
    ((36, 5, 0), "6.2.2"),
    ((36, 5, 2), "6.2.3"),
    ((39, 2, 0), "7.2"),
    ((39, 2, 1), "7.2.1"),
)


@dataclass(frozen=True)
class Fault:
    """A fault that a release is known for, or that this board shows.

    Attributes:
        found: What is wrong.
        remedy: What to do.
    """

    found: str
    remedy: str


@dataclass(frozen=True)
class Board:
    """One look at a Jetson; a field is empty where the board does not say.

    Attributes:
        model: As the device tree has it.
        module: ``AGX Orin 64GB``; by part number, else by the memory.
        l4t: Release of the system, ``36.4.3``.
        jetpack: The JetPack it belongs to, if known.
        power_mode: Name of nvpmodel's mode, ``MAXN``.
        clocks: Hz by name: ``gpu``, ``gpu_max``, ``emc_cap`` (0: no cap), ``cpu0``.
        temperatures: °C by zone without its ``-thermal``.
        thermal_margin: Degrees that the zone nearest to its throttling point is below it.
        rails: Watts by rail.
        throttle_events: Over-current events since boot, by cause.
        gpu_load: 0 to 1.
        memory_total: Bytes of the memory that CPU and GPU share.
        memory_available: Bytes that programs can still take.
        faults: What this release or board is known for.
    """

    model: str = ""
    module: str = ""
    l4t: str = ""
    jetpack: str = ""
    power_mode: str = ""
    clocks: dict[str, int] = field(default_factory=dict)
    temperatures: dict[str, float] = field(default_factory=dict)
    thermal_margin: float | None = None
    rails: dict[str, float] = field(default_factory=dict)
    throttle_events: dict[str, int] = field(default_factory=dict)
    gpu_load: float | None = None
    memory_total: int | None = None
    memory_available: int | None = None
    faults: tuple[Fault, ...] = ()


def is_jetson(root: Path = Path("/")) -> bool:
    """Whether the device tree names a Tegra; in a container without one, whether its release file is there."""
    names = _read(root / "proc/device-tree/compatible").split("\0")
    return any(name.startswith("nvidia,tegra") for name in names) or bool(_release(root))


def read_board(root: Path = Path("/")) -> Board | None:
    """Look at the board; None where this is no Jetson. Takes some milliseconds, and never raises.

    Args:
        root: Where the file system begins.
    """
    if not is_jetson(root):
        return None
    total, available = read_memory(root)
    temperatures, margin = read_temperatures(root)
    l4t = ".".join(map(str, _release(root)))
    clocks, load = _clocks(root)
    return Board(
        model=_read(root / "proc/device-tree/model").strip("\0 \n")[:200],
        module=_module(root, total),
        l4t=l4t,
        jetpack=next((name for release, name in _JETPACKS if release == _release(root)[: len(release)]), ""),
        power_mode=read_power_mode(root),
        clocks=clocks,
        temperatures=temperatures,
        thermal_margin=margin,
        rails=read_rails(root),
        throttle_events=read_throttle_events(root),
        gpu_load=load,
        memory_total=total,
        memory_available=available,
        faults=tuple(_faults(root, l4t)),
    )


def read_temperatures(root: Path = Path("/")) -> tuple[dict[str, float], float | None]:
    """°C by zone, and the smallest distance of a zone to the point where software throttles it."""
    temperatures: dict[str, float] = {}
    margins: list[float] = []
    for zone in _folders(root / "sys/class/thermal", "thermal_zone*"):
        name = _read(zone / "type").strip().removesuffix("-thermal")
        value = _number(zone / "temp")
        if not name or value is None or not name.isprintable():
            continue
        celsius = value / 1000
        if not _SANE_CELSIUS[0] < celsius < _SANE_CELSIUS[1]:  # a zone that is switched off says -256
            continue
        temperatures[name[:64]] = celsius
        trips = [
            trip / 1000
            for place in _files(zone, "trip_point_*_type")
            if _read(place).strip() == "passive"
            and (trip := _number(place.with_name(place.name.replace("_type", "_temp")))) is not None
        ]
        limit = min((trip for trip in trips if _THROTTLE_FLOOR <= trip < _SANE_CELSIUS[1]), default=None)
        if limit is not None:
            margins.append(limit - celsius)
    return temperatures, min(margins, default=None)


def read_rails(root: Path = Path("/")) -> dict[str, float]:
    """Watts by rail of the INA3221 monitors; the sum of the shunts and unconnected channels are left out."""
    rails: dict[str, float] = {}
    for device in _folders(root / "sys/bus/i2c/drivers/ina3221", "*-00*"):
        for monitor in _folders(device / "hwmon", "hwmon*"):
            for place in _files(monitor, "in*_label"):
                channel = place.name.removeprefix("in").removesuffix("_label")
                label = _read(place).strip()
                if not label or label == "NC" or channel == "7" or not label.isprintable() or "sum" in label:
                    continue
                millivolts = _number(monitor / f"in{channel}_input")
                milliamperes = _number(monitor / f"curr{channel}_input")
                if millivolts is not None and milliamperes is not None:
                    rails[label[:64]] = round(millivolts * milliamperes / 1e6, 3)
    return rails


def read_throttle_events(root: Path = Path("/")) -> dict[str, int]:
    """Over-current events since boot: oc1 under-voltage, oc2 average, oc3 peak (expected now and then in MAXN)."""
    names = {"oc1": "under_voltage", "oc2": "average_over_current", "oc3": "peak_over_current"}
    events: dict[str, int] = {}
    for monitor in _folders(root / "sys/devices/platform/soctherm-oc-event/hwmon", "hwmon*"):
        for key, name in names.items():
            count = _number(monitor / f"{key}_event_cnt")
            if count is not None and count >= 0:
                events[name] = count
    return events


def read_power_mode(root: Path = Path("/")) -> str:
    """Name of nvpmodel's mode, from its status file and the board's own list of modes; ids differ between boards."""
    match = re.search(r"pmode:([0-9]{1,6})", _read(root / "var/lib/nvpmodel/status"))
    if match is None:
        return ""
    wanted = int(match[1])
    for entry in re.findall(r"<\s*POWER_MODEL\b([^>]{0,200})>", _read(root / "etc/nvpmodel.conf")):
        number = re.search(r"\bID\s*=\s*([0-9]{1,6})", entry)
        name = re.search(r"\bNAME\s*=\s*([A-Za-z0-9_.+-]{1,64})", entry)
        if number is not None and name is not None and int(number[1]) == wanted:
            return name[1]
    return f"mode {wanted}"


def read_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Total and available bytes of the unified memory.

    CUDA's own figure is the kernel's MemFree, without the page cache that it would give up: MemAvailable is what a
    budget can count on.
    """
    values: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        match = re.fullmatch(r"(MemTotal|MemAvailable):\s*([0-9]{1,15}) kB", line.strip())
        if match is not None:
            values[match[1]] = int(match[2]) * 1024
    return values.get("MemTotal"), values.get("MemAvailable")


def _release(root: Path) -> tuple[int, ...]:
    """``(36, 4, 3)``; empty where nothing says it. The date in that line changes its form: it is not looked at."""
    first = _read(root / "etc/nv_tegra_release").partition("\n")[0]
    match = re.search(r"\bR([0-9]{1,4})\b.*?\bREVISION:\s*([0-9]{1,4}(?:\.[0-9]{1,4}){0,2})", first)
    if match is None:
        return ()
    return (int(match[1]), *map(int, match[2].split(".")))


def _module(root: Path, memory: int | None) -> str:
    names = _read(root / "proc/device-tree/compatible").split("\0")
    names += re.findall(r"p[0-9]{4}-[0-9]{4}", _read(root / "etc/nv_boot_control.conf"))
    for name in names:
        for part, module in _MODULES.items():
            if part in name:
                return module
    if "nvidia,tegra234" in names and memory is not None:
        # The model's name does not tell 32 from 64 GB; NVIDIA's own tools look at the memory.
        if memory >= 56 * GIB:
            return "AGX Orin 64GB"
        if memory >= 28 * GIB:
            return "AGX Orin 32GB"
    return ""


def _clocks(root: Path) -> tuple[dict[str, int], float | None]:
    """Clocks in Hz, and the load of the GPU."""
    clocks: dict[str, int] = {}
    load = None
    gpu = _gpu_folder(root)
    if gpu is not None:
        for key, name in (("gpu", "cur_freq"), ("gpu_min", "min_freq"), ("gpu_max", "max_freq")):
            value = _number(gpu / name)
            if value is not None and value >= 0:
                clocks[key] = value
        per_mille = _number(gpu / "device/load")
        load = per_mille / 1000 if per_mille is not None and 0 <= per_mille <= 1000 else None
    cap = _number(root / "sys/kernel/nvpmodel_clk_cap/emc")
    if cap is not None and cap >= 0:
        clocks["emc_cap"] = cap
    for cpu in _folders(root / "sys/devices/system/cpu", "cpu[0-9]*"):
        value = _number(cpu / "cpufreq/scaling_cur_freq")
        if value is not None and value >= 0:
            clocks[cpu.name[:16]] = value * 1000
    return clocks, load


def _gpu_folder(root: Path) -> Path | None:
    """The GPU's devfreq folder; its name differs from release to release."""
    for folder in _folders(root / "sys/class/devfreq", "*"):
        kind = _read(folder / "device/of_node/name").strip("\0 \n")
        if kind in ("gpu", "ga10b") or folder.name.endswith((".gpu", ".ga10b")) or folder.name == "gpu-gpc-0":
            return folder
    return None


def _faults(root: Path, l4t: str) -> list[Fault]:
    faults = []
    if l4t in ("36.4.7", "38.2.2", "35.6.3"):
        faults.append(
            Fault(
                f"L4T {l4t}: NvMap refuses large allocations (error 12) while the page cache is full",
                "upgrade to L4T 36.5 (JetPack 6.2.2); until then start edged early after boot, or as root: "
                "sync; echo 3 > /proc/sys/vm/drop_caches",
            )
        )
    if l4t.startswith("39.2.0") and read_power_mode(root).endswith("15W"):
        faults.append(
            Fault(
                f"L4T {l4t} in the 15 W mode: a reboot may crash (issue 6236259)",
                "upgrade to L4T 39.2.1, or choose another power mode",
            )
        )
    nodes = [path.name for path in _folders(root / "dev/nvgpu/igpu0", "*", files=True)]
    if (root / "dev/nvgpu/igpu0").is_dir() and nodes == ["power"] and _gpu_folder(root) is None:
        faults.append(
            Fault(
                "the GPU's firmware did not start: /dev/nvgpu/igpu0 holds only power",
                "switch the board's power off and on; a warm reboot may not clear it",
            )
        )
    return faults


def _read(path: Path) -> str:
    """Text of a small file; empty where it cannot be read."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(_READ_LIMIT).decode("utf-8", "replace")
    except (OSError, ValueError):  # a zone that is switched off answers EAGAIN
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if _NUMBER.fullmatch(text) else None


def _folders(folder: Path, pattern: str, *, files: bool = False) -> list[Path]:
    found: list[Path] = []
    with suppress(OSError, ValueError):
        found = sorted(path for path in folder.glob(pattern) if files or path.is_dir())
    return found[:256]


def _files(folder: Path, pattern: str) -> list[Path]:
    found: list[Path] = []
    with suppress(OSError, ValueError):
        found = sorted(folder.glob(pattern))
    return found[:256]
