"""Finds the path of a drafted tree that the target's own tokens follow."""
