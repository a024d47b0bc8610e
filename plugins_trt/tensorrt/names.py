"""Names and versions that a graph's nodes and the plugins share."""

from __future__ import annotations

NAMESPACE = "edged"
"""ONNX domain and plugin namespace of every node of ours."""

ATTENTION = "Attention"

ATTENTION_VERSION = "1"
"""Rises when the plugin's fields, inputs or outputs change."""

W4A16_LINEAR, TERNARY_LINEAR = "W4A16Linear", "TernaryLinear"

W4A16_LINEAR_VERSION = TERNARY_LINEAR_VERSION = "1"

VERIFY_TREE, VERIFY_TREE_VERSION = "VerifyTree", "1"
