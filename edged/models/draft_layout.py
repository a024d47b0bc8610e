"""Where a draft's weights stand in its folder: the layouts that are published, and which of them a folder has.

Every layout is one decoder layer with something in front of it and behind it, so all of them are held under the same part
names; what differs is the tensors' spelling and which parts there are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edged.models.architecture import Architecture

EAGLE, EAGLE3, MTP = "eagle", "eagle3", "mtp"

_WEIGHTS_OF_A_LAYER = {
    "q": "*self_attn.q_proj.weight",
    "k": "*self_attn.k_proj.weight",
    "v": "*self_attn.v_proj.weight",
    "output": "*self_attn.o_proj.weight",
    "mlp_norm": "*post_attention_layernorm.weight",
    "gate": "*mlp.gate_proj.weight",
    "up": "*mlp.up_proj.weight",
    "down": "*mlp.down_proj.weight",
}
_OPTIONAL_OF_A_LAYER = {
    "q_bias": "*self_attn.q_proj.bias",
    "k_bias": "*self_attn.k_proj.bias",
    "v_bias": "*self_attn.v_proj.bias",
    "q_norm": "*self_attn.q_norm.weight",
    "k_norm": "*self_attn.k_norm.weight",
}
_TOGETHER = (
    ("embedding_norm", "hidden_norm"),
    ("q_bias", "k_bias", "v_bias"),
    ("q_norm", "k_norm"),
)
_SHARED = ("embed_tokens.weight", "lm_head.weight")
"""The target's own are used in their place."""


@dataclass(frozen=True)
class Layout:
    """The tensors of one draft.

    Attributes:
        kind: :data:`EAGLE`, :data:`EAGLE3` or :data:`MTP`.
        prefix: In front of the layer's own tensors, the ``*`` of a pattern.
        needed: Tensor of each part that must be there.
        optional: Of each that may be.
        ignored: Tensors that are known and not used.
        whole: Whether everything in the folder must be one of these; otherwise what stands under the prefix must.
        hidden_first: ``fc`` takes ``[hidden; embedding]``.
        feeds_normed: The next level sees the output behind the final norm.
    """

    kind: str
    prefix: str
    needed: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = _SHARED
    whole: bool = True
    hidden_first: bool = False
    feeds_normed: bool = False

    @classmethod
    def of(cls, names: Iterable[str]) -> Layout:
        """The layout of a folder with these tensors, each without ``model.`` in front."""
        known = list(names)
        for name in sorted(known, key=_layer_number):
            found = _MTP.match(name)
            if found:
                return _deepseek(found[1]) if found[2] == "eh_proj" else _mimo(found[1])
        prefix = next(
            (each for each in _PREFIXES if any(name.startswith(each) for name in known)), _PREFIXES[0]
        )
        if prefix == "midlayer." or f"{prefix}hidden_norm.weight" in known:
            return _eagle3(prefix)
        return _eagle(prefix)

    def tensor(self, pattern: str) -> str:
        """A pattern's tensor."""
        return pattern.replace("*", self.prefix)

    def shape(self, part: str, a: Architecture, draft_vocabulary: int) -> tuple[int, ...]:
        """The shape of a part; matrices are ``[out, in]``."""
        inputs = 2 * a.hidden if self.kind == EAGLE3 else a.hidden  # of attention
        shapes = {
            "fc": (a.hidden, (3 if self.kind == EAGLE3 else 2) * a.hidden),
            "q": (a.q_width, inputs),
            "k": (a.kv_width, inputs),
            "v": (a.kv_width, inputs),
            "output": (a.hidden, a.q_width),
            "gate": (a.intermediate, a.hidden),
            "up": (a.intermediate, a.hidden),
            "down": (a.hidden, a.intermediate),
            "head": (draft_vocabulary, a.hidden),
            "q_bias": (a.q_width,),
            "k_bias": (a.kv_width,),
            "v_bias": (a.kv_width,),
            "q_norm": (a.head_dim,),
            "k_norm": (a.head_dim,),
        }
        return shapes.get(part, (a.hidden,))

    def resolve(self, names: Mapping[str, str], where: str) -> dict[str, str]:
        """The tensor of each part, by the names in the files.

        Args:
            names: Tensors without ``model.`` in front, to their names in the files; a 4-bit linear's as ``.weight``.
            where: Stands before messages.

        Raises:
            CheckpointError: Some are missing or have no place, or are there without those they come with.
        """
        rest = dict(names)
        found: dict[str, str] = {}
        faults: list[str] = []
        for part, pattern in {**self.needed, **self.optional}.items():
            name = rest.pop(self.tensor(pattern), None)
            if name is not None:
                found[part] = name
            elif part in self.needed:
                faults.append(f"{self.tensor(pattern)} is missing")
        ignored = {self.tensor(pattern) for pattern in self.ignored}
        faults += [
            f"{full} has no place in {TITLES[self.kind]}"
            for name, full in rest.items()
            if name not in ignored and (self.whole or name.startswith(self.prefix))
        ]
        for group in _TOGETHER:
            there = [part for part in group if part in found]
            if there and len(there) < len(group):
                every = {**self.needed, **self.optional}
                titles = [self.tensor(every[part]).rpartition(".")[0].rpartition(".")[2] for part in group]
                faults.append(f"{', '.join(titles[:-1])} and {titles[-1]} come together")
        if faults:
            raise CheckpointError(f"{where}: no draft of this target: {'; '.join(faults[:8])}")
        return found


_PREFIXES = ("midlayer.", "eagle_layers.0.", "layers.0.")
_MTP = re.compile(r"((?:layers|mtp_layers)\.\d+\.)(eh_proj|input_proj)\.(?:weight|qweight)$")
TITLES = {EAGLE: "an EAGLE draft", EAGLE3: "an EAGLE-3 draft", MTP: "an MTP head"}


def _layer_number(name: str) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _eagle(prefix: str) -> Layout:
    """EAGLE's own (arXiv 2401.15077), without a norm before attention, and MiniCPM4's, with norms before ``fc``."""
    return Layout(
        EAGLE,
        prefix,
        {"fc": "fc.weight", **_WEIGHTS_OF_A_LAYER},
        {
            "fc_bias": "fc.bias",
            "embedding_norm": "input_norm1.weight",
            "hidden_norm": "input_norm2.weight",
            "attention_norm": "*input_layernorm.weight",
            **_OPTIONAL_OF_A_LAYER,
        },
    )


def _eagle3(prefix: str) -> Layout:
    """EAGLE-3 (arXiv 2503.01840): three of the target's states fused, attention over ``[embedding; hidden]``."""
    return Layout(
        EAGLE3,
        prefix,
        {
            "fc": "fc.weight",
            "embedding_norm": "*input_layernorm.weight",
            "hidden_norm": "*hidden_norm.weight",
            **_WEIGHTS_OF_A_LAYER,
            "final_norm": "norm.weight",
            "head": "lm_head.weight",
        },
        {"d2t": "d2t", "t2d": "t2d", **_OPTIONAL_OF_A_LAYER},
        ignored=("embed_tokens.weight",),
    )


def _deepseek(prefix: str) -> Layout:
    """DeepSeek-V3's (arXiv 2412.19437, section 2.2): a further layer of the target itself."""
    return Layout(
        MTP,
        prefix,
        {
            "fc": "*eh_proj.weight",
            "embedding_norm": "*enorm.weight",
            "hidden_norm": "*hnorm.weight",
            "attention_norm": "*input_layernorm.weight",
            **_WEIGHTS_OF_A_LAYER,
            "final_norm": "*shared_head.norm.weight",
        },
        _OPTIONAL_OF_A_LAYER,
        ignored=("*embed_tokens.weight", "*shared_head.head.weight", "*self_attn.rotary_emb.inv_freq"),
        whole=False,
    )


def _mimo(prefix: str) -> Layout:
    """MiMo's (arXiv 2505.07608): the hidden state comes first in ``fc``, and levels below see what the final norm gives."""
    return Layout(
        MTP,
        prefix,
        {
            "fc": "*input_proj.weight",
            "embedding_norm": "*token_layernorm.weight",
            "hidden_norm": "*hidden_layernorm.weight",
            "attention_norm": "*input_layernorm.weight",
            **_WEIGHTS_OF_A_LAYER,
            "final_norm": "*final_layernorm.weight",
        },
        _OPTIONAL_OF_A_LAYER,
        ignored=("*embed_tokens.weight", "*self_attn.rotary_emb.inv_freq"),
        whole=False,
        hidden_first=True,
        feeds_normed=True,
    )
