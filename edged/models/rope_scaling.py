"""The configuration's ``rope_scaling`` in the place of the model's own, and the lists of factors that were published.

A factor list is fixed when a model is loaded: no key ever depends on how long its sequence became.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.config import RopeScalingConfig

_CONTEXT = 131072

# fmt: off
# OpenBMB/CPM.cu, --minicpm4-yarn; also in the README of MiniCPM4 from July 2025.
_MINICPM4 = (
    0.9977997200264581, 1.014658295992452, 1.0349680404997148, 1.059429246056193, 1.0888815016813513,
    1.1243301355211495, 1.166977103606075, 1.2182568066927284, 1.2798772354275727, 1.3538666751582975,
    1.4426259039919596, 1.5489853358570191, 1.6762658237220625, 1.8283407612492941, 2.0096956085876183,
    2.225478927469756, 2.481536379650452, 2.784415934557119, 3.1413289096347365, 3.560047844772632,
    4.048719380066383, 4.752651957515948, 5.590913044973868, 6.584005926629993, 7.7532214876576155,
    9.119754865903639, 10.704443927019176, 12.524994176518703, 14.59739595363613, 16.93214476166354,
    19.53823297353041, 22.417131025031697, 25.568260840911098, 28.991144156566317, 32.68408069090375,
    36.65174474170465, 40.90396065611201, 45.4664008671033, 50.37147343433591, 55.6804490772103,
    61.470816952306556, 67.8622707390618, 75.00516023410414, 83.11898235973767, 92.50044360202462,
    103.57086856690864, 116.9492274587385, 118.16074567836519, 119.18497548708795, 120.04810876261652,
    120.77352815196981, 121.38182790207875, 121.89094985353891, 122.31638758099915, 122.6714244963338,
    122.9673822552567, 123.21386397019609, 123.41898278254268, 123.58957065488238, 123.73136519024158,
    123.84917421274221, 123.94701903496814, 124.02825801299717, 124.09569231686116,
)
# README of MiniCPM4.1.
_MINICPM41 = (
    0.9982316082870437, 1.033048153422584, 1.0749920956484724, 1.1255096879436193, 1.1863348602111476,
    1.259543828902579, 1.3476188888731149, 1.4535223827776373, 1.5807816745852985, 1.7335856049489526,
    1.9168922912975785, 2.1365471404135326, 2.3994084200118646, 2.713475511863602, 3.0880118452194134,
    3.533650295140154, 4.062463396503134, 4.687974098908333, 5.425075306704039, 6.289818967956352,
    7.29902962722721, 8.6357018163639, 10.210822723989212, 12.053807765671676, 14.193944598909404,
    16.65780676784363, 19.463620727694074, 22.628311203524586, 26.150106147261315, 30.02526691405111,
    34.23183327975347, 38.73811934094828, 43.502489489729555, 48.47627117965394, 53.61139491762471,
    58.857366522037935, 64.16798299215064, 69.51359464319125, 74.86555458220285, 80.21497790341579,
    85.55322183307433, 90.89611806932027, 96.26245306514224, 101.68269304046481, 107.18619510219668,
    112.82253283014026, 118.63764063163615, 119.88866203644656, 120.9462882391725, 121.837565139014,
    122.58663780572562, 123.2147719894291, 123.74049454862576, 124.17980424685767, 124.54641761955492,
    124.85202548028222, 125.10654406389756, 125.31835105170659, 125.49450117164764, 125.64091910903052,
    125.76256945356558, 125.86360463815589, 125.94749252260765, 126.01712561287873,
)
# fmt: on

_ORIGINAL = "original_max_position_embeddings"


def _preset(factors: tuple[float, ...], original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": list(factors),
        "long_factor": list(factors),
        _ORIGINAL: original,
        "factor": _CONTEXT / original,
        # The released code scales neither cos nor sin; the usual formula would.
        "attention_factor": 1.0,
    }


PRESETS: Mapping[str, dict[str, Any]] = {
    "minicpm4-128k": _preset(_MINICPM4, 32768),
    "minicpm4.1-128k": _preset(_MINICPM41, 65536),
}
"""LongRoPE for 131 072 tokens, by the names that ``rope_scaling.preset`` takes."""

_KEYS = (
    "factor",
    _ORIGINAL,
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
)
_LISTS = ("short_factor", "long_factor")


def rope_scaling_values(scaling: RopeScalingConfig) -> dict[str, Any]:
    """What would stand in ``config.json`` under ``rope_scaling``."""
    if scaling.preset is not None:
        return dict(PRESETS[scaling.preset])
    values: dict[str, Any] = {"rope_type": scaling.type}
    values |= {key: getattr(scaling, key) for key in _KEYS if getattr(scaling, key) is not None}
    values |= {key: list(getattr(scaling, key)) for key in _LISTS if getattr(scaling, key)}
    if scaling.type == "longrope" and scaling.short_factor and not scaling.long_factor:
        values["long_factor"] = values["short_factor"]
    elif scaling.type == "longrope" and scaling.long_factor and not scaling.short_factor:
        values["short_factor"] = values["long_factor"]
    return values


def with_rope_scaling(config: Mapping[str, Any], scaling: RopeScalingConfig) -> dict[str, Any]:
    """A model's configuration with another scaling; its ``rope_theta`` stays.

    Where the new scaling does not say how long sequences were at training, the model's own scaling does.
    """
    values = rope_scaling_values(scaling)
    changed = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        old = changed.pop(key, None)
        if isinstance(old, dict):
            for kept in ("rope_theta", "partial_rotary_factor", _ORIGINAL):
                if old.get(kept) is not None:
                    values.setdefault(kept, old[kept])
    if _ORIGINAL in values:  # the file's own key at its top would win otherwise
        changed.pop(_ORIGINAL, None)
    return {**changed, "rope_scaling": values}
