"""Trees of system files, as boards show them: recorded lines, put where a root is to be."""

from __future__ import annotations

RELEASES = {
    "6.2": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 01:49:37 UTC "
    "2025\n# KERNEL_VARIANT: oot\nTARGET_USERSPACE_LIB_DIR=nvidia\n",
    "6.2.1": "# R36 (release), REVISION: 4.7, GCID: 42132812, BOARD: generic, EABI: aarch64, DATE: Thu Sep 18 22:54:44 UTC "
    "2025\n",
    "7.2": "# R39 (release), REVISION: 2.0, GCID: 45755727, BOARD: generic, EABI: aarch64, DATE: Mon Jun  1 09:28:48 PM UTC "
    "2026\n",
}
MODES = """\
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1
< POWER_MODEL NAME=MODE_15W ID=1 >
< POWER_MODEL ID=2 NAME=MODE_30W >
< POWER_MODEL ID=3 NAME={third} >
< PM_CONFIG DEFAULT=2 >
"""


def zone(name, celsius, *, trips=((99000, "passive"), (103000, "hot"), (104500, "critical"))):
    files = {
        "type": f"{name}-thermal\n",
        "temp": celsius if isinstance(celsius, str) else f"{round(celsius * 1000)}\n",
    }
    for index, (value, kind) in enumerate(trips):
        files[f"trip_point_{index}_temp"] = f"{value}\n"
        files[f"trip_point_{index}_type"] = f"{kind}\n"
    return files


def orin(*, memory=64, jetpack="6.2", celsius=45.0, mode=0, events=(0, 0, 0), gpu_hertz=1_300_500_000):
    """Files of an AGX Orin dev kit: path below the root to content."""
    part = {64: "p3701-0005", 32: "p3701-0004"}[memory]
    total = {64: 64_348_160, 32: 31_286_272}[memory]
    gpu = {"6": "17000000.gpu", "7": "17000000.gpu"}[jetpack[0]]
    third = {64: "MODE_50W", 32: "MODE_40W"}[memory]
    files = {
        "proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
        "proc/device-tree/compatible": f"nvidia,p3737-0000+{part}\0nvidia,{part}\0nvidia,tegra234\0",
        "etc/nv_tegra_release": RELEASES[jetpack],
        "etc/nvpmodel.conf": MODES.format(third=third),
        "var/lib/nvpmodel/status": f"pmode:{mode:04d} fmode:quiet\n",
        "proc/meminfo": f"MemTotal:       {total} kB\nMemFree:         1000000 kB\nMemAvailable:   {total // 2} kB\n",
        f"sys/class/devfreq/{gpu}/cur_freq": f"{gpu_hertz}\n",
        f"sys/class/devfreq/{gpu}/min_freq": "306000000\n",
        f"sys/class/devfreq/{gpu}/max_freq": "1300500000\n",
        f"sys/class/devfreq/{gpu}/device/load": "320\n",
        f"sys/class/devfreq/{gpu}/device/of_node/name": "gpu\0",
        "sys/kernel/nvpmodel_clk_cap/emc": "0\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "729600\n",
    }
    zones = [
        zone("cpu", celsius - 1),
        zone("gpu", celsius - 4),
        zone("cv0", "-256000\n"),
        zone("soc0", celsius - 6),
        zone("tj", celsius),
        zone("hot-surface-alert", celsius - 3, trips=((70000, "passive"),)),
    ]
    for index, content in enumerate(zones):
        files |= {f"sys/class/thermal/thermal_zone{index}/{name}": text for name, text in content.items()}
    for index, count in enumerate(events, 1):
        files[f"sys/devices/platform/soctherm-oc-event/hwmon/hwmon4/oc{index}_event_cnt"] = f"{count}\n"
    monitors = {
        "1-0040": [("VDD_GPU_SOC", 5000, 877), ("VDD_CPU_CV", 4992, 239), ("VIN_SYS_5V0", 5056, 1098)],
        "1-0041": [("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 1800, 500)],
    }
    for device, rails in monitors.items():
        folder = f"sys/bus/i2c/drivers/ina3221/{device}/hwmon/hwmon{device[-1]}"
        for channel, (label, millivolts, milliamperes) in enumerate(rails, 1):
            files[f"{folder}/in{channel}_label"] = f"{label}\n"
            files[f"{folder}/in{channel}_input"] = f"{millivolts}\n"
            files[f"{folder}/curr{channel}_input"] = f"{milliamperes}\n"
        files[f"{folder}/in7_label"] = "sum of shunt voltages\n"
        files[f"{folder}/in7_input"] = "3\n"
    return files


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root
