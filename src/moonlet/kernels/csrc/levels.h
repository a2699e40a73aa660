// The instruction-set levels: one table of functions per level, and the choice among them.
//
// Sources that include lanes.h or intrinsics are compiled once per level, with that level's flags and
// into that level's namespace. Nothing here is an inline function: a shared inline compiled with
// AVX-512 flags could be the copy that the linker keeps for every level.
#pragma once

#include "moonlet.h"

// Declares the table `name` of every level.
#define MOONLET_TABLE(Type, name) \
  namespace scalar {              \
  extern const Type name;         \
  }                               \
  namespace avx2 {                \
  extern const Type name;         \
  }                               \
  namespace avx512 {              \
  extern const Type name;         \
  }                               \
  namespace vnni {                \
  extern const Type name;         \
  }

// The table `name` of a level, or a null pointer where this processor or build lacks the level.
#ifdef MOONLET_X86
#define MOONLET_PICK(name, level)                                       \
  ((level) < 0 || (level) > moonlet_isa_level() ? nullptr               \
   : (level) == MOONLET_ISA_LEVEL_VNNI         ? &moonlet::vnni::name   \
   : (level) == MOONLET_ISA_LEVEL_AVX512       ? &moonlet::avx512::name \
   : (level) == MOONLET_ISA_LEVEL_AVX2         ? &moonlet::avx2::name   \
                                               : &moonlet::scalar::name)
#else
#define MOONLET_PICK(name, level) ((level) == 0 ? &moonlet::scalar::name : nullptr)
#endif
