// Ends of rows whose size is no multiple of the lanes.
//
// Like lanes.h: every level gets its private copy (anonymous namespace, always inlined). Include
// inside a file that is compiled once per level.
#pragma once

#include <stdint.h>
#include <string.h>

#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// The first `count` lanes from memory; the others keep their value in `rest`.
MOONLET_INLINE Lanes load_first(const float* p, int64_t count, Lanes rest) {
  memcpy(&rest, p, static_cast<size_t>(count) * sizeof(float));
  return rest;
}

MOONLET_INLINE void store_first(float* p, Lanes v, int64_t count) {
  memcpy(p, &v, static_cast<size_t>(count) * sizeof(float));
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet
