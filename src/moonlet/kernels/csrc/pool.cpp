#include "pool.h"

#include <pthread.h>

#include <atomic>

namespace moonlet {
namespace {

constexpr int kMaxWorkers = 63;

struct Task {
  Work work;
  void* context;
  int64_t count, grain;
};

// Plain data with static initialisers: nothing to construct, nothing to destroy at exit.
pthread_mutex_t entry = PTHREAD_MUTEX_INITIALIZER;  // held by the one call that uses the workers
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;   // guards everything below
pthread_cond_t has_task = PTHREAD_COND_INITIALIZER;
pthread_cond_t has_finished = PTHREAD_COND_INITIALIZER;
Task task;
int num_workers = 0;
int num_open = 0;     // workers that may still join the task
int num_running = 0;  // workers inside it
std::atomic<int64_t> next_piece{0};
bool watches_fork = false;

void take_pieces(const Task& mine) {
  for (;;) {
    const int64_t first = next_piece.fetch_add(mine.grain, std::memory_order_relaxed);
    if (first >= mine.count) return;
    const int64_t last = first + mine.grain;
    mine.work(mine.context, first, last < mine.count ? last : mine.count);
  }
}

void* worker(void*) {
  pthread_mutex_lock(&lock);
  for (;;) {
    while (num_open == 0) pthread_cond_wait(&has_task, &lock);
    --num_open;
    ++num_running;
    const Task mine = task;
    pthread_mutex_unlock(&lock);
    take_pieces(mine);
    pthread_mutex_lock(&lock);
    if (--num_running == 0) pthread_cond_signal(&has_finished);
  }
}

// The child of a fork has no workers and must not wait for locks that they held.
void forget_workers() {
  entry = PTHREAD_MUTEX_INITIALIZER;
  lock = PTHREAD_MUTEX_INITIALIZER;
  has_task = PTHREAD_COND_INITIALIZER;
  has_finished = PTHREAD_COND_INITIALIZER;
  num_workers = num_open = num_running = 0;
}

// Starts workers until there are `wanted`, or as many as the system gives.
void start_workers(int wanted) {
  if (!watches_fork) {
    pthread_atfork(nullptr, nullptr, forget_workers);
    watches_fork = true;
  }
  pthread_attr_t attributes;
  if (num_workers >= wanted || pthread_attr_init(&attributes) != 0) return;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  while (num_workers < wanted) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, worker, nullptr) != 0) break;
    ++num_workers;
  }
  pthread_attr_destroy(&attributes);
}

}  // namespace

void run_parallel(int64_t count, int64_t grain, int32_t num_threads, Work work, void* context) {
  if (grain < 1) grain = 1;
  const int64_t pieces = (count + grain - 1) / grain;
  int64_t helpers = num_threads < pieces ? num_threads - 1 : pieces - 1;
  if (helpers > kMaxWorkers) helpers = kMaxWorkers;
  if (helpers < 1 || pthread_mutex_trylock(&entry) != 0) {
    if (count > 0) work(context, 0, count);
    return;
  }
  const Task mine = {work, context, count, grain};
  pthread_mutex_lock(&lock);
  start_workers(static_cast<int>(helpers));
  task = mine;
  next_piece.store(0, std::memory_order_relaxed);
  num_open = helpers < num_workers ? static_cast<int>(helpers) : num_workers;
  for (int i = 0; i < num_open; ++i) pthread_cond_signal(&has_task);
  pthread_mutex_unlock(&lock);
  take_pieces(mine);
  pthread_mutex_lock(&lock);
  num_open = 0;  // whoever has not woken yet finds nothing to do
  while (num_running > 0) pthread_cond_wait(&has_finished, &lock);
  pthread_mutex_unlock(&lock);
  pthread_mutex_unlock(&entry);
}

}  // namespace moonlet
