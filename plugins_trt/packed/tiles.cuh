// What packed weights of every kind have in common: tiles of 16 outputs.
#pragma once
#include "common.cuh"
#include "packed/device.cuh"

constexpr int kTile = 16;  // outputs of a tile
constexpr int kHalf = 8;   // of them gate's, of gated weights
