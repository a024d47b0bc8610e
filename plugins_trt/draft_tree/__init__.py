"""A tree out of a draft's distributions, a level at a time, on the device: EAGLE-2's growth (arXiv 2406.16858)."""
