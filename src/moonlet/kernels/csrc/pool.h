// Threads of the native kernels: a bounded pool whose idle threads sleep in the kernel.
//
// Included by files with baseline flags only (see levels.h).
#pragma once

#include <stdint.h>

namespace moonlet {

typedef void (*Work)(void* context, int64_t first, int64_t last);

// Runs work over [0, count) in pieces of at most `grain`, on at most num_threads threads of which the
// caller is one. Threads take the next piece when they are done with one, so a busy neighbour slows
// the call by its share only. A piece is computed by one thread in one order: results do not depend
// on the number of threads. Nested and concurrent calls run on their caller's thread alone.
void run_parallel(int64_t count, int64_t grain, int32_t num_threads, Work work, void* context);

// The same for anything callable as (first, last).
template <typename Callable>
void parallel(int64_t count, int64_t grain, int32_t num_threads, const Callable& callable) {
  run_parallel(
      count, grain, num_threads,
      [](void* context, int64_t first, int64_t last) {
        (*static_cast<const Callable*>(context))(first, last);
      },
      const_cast<Callable*>(&callable));
}

}  // namespace moonlet
