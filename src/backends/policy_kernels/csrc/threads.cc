// The pool. Everything it shares is guarded by one mutex; regions (one per parallel_for) are
// counted references, because an executor may run a task after its region has ended.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <cstdlib>

#include "checks.h"

namespace pk {
namespace {

constexpr int64_t kMaxThreads = 1024;
// Two threads are worth it when each has this much to do.
constexpr int64_t kNanosecondsPerThread = 25000;
constexpr int64_t kSpins = 1500;  // some 20 to 50 microseconds

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

struct Region {
  std::atomic<int64_t> next;
  std::atomic<int64_t> unfinished;
  std::atomic<int64_t> references;
  int64_t count;
  void (*body)(void*, int64_t);
  void* context;
  int64_t openings;  // helpers that may still join; guarded by the pool's mutex
  bool finished;     // guarded by `mutex`
  pthread_mutex_t mutex;
  pthread_cond_t end;
  Region* following;  // in the pool's list of open regions, or of spare ones
};

struct Pool {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t work = PTHREAD_COND_INITIALIZER;
  Region* open = nullptr;
  Region* spare = nullptr;
  int64_t workers = 0;
  int64_t sleeping = 0;
  std::atomic<int64_t> openings{0};
};

Pool pool;
pthread_once_t fork_handlers = PTHREAD_ONCE_INIT;
std::atomic<int64_t> asked_threads{0};
std::atomic<int64_t> default_threads{0};

void before_fork() { pthread_mutex_lock(&pool.mutex); }
void after_fork_in_parent() { pthread_mutex_unlock(&pool.mutex); }

// The child has none of the workers, and regions that were open belong to threads it lacks.
void after_fork_in_child() {
  pool.mutex = PTHREAD_MUTEX_INITIALIZER;
  pool.work = PTHREAD_COND_INITIALIZER;
  pool.open = nullptr;
  pool.workers = 0;
  pool.sleeping = 0;
  pool.openings = 0;
}

void install_fork_handlers() {
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

Region* take_region() {
  pthread_mutex_lock(&pool.mutex);
  Region* region = pool.spare;
  if (region != nullptr) pool.spare = region->following;
  pthread_mutex_unlock(&pool.mutex);
  if (region != nullptr) return region;
  region = static_cast<Region*>(std::calloc(1, sizeof(Region)));
  if (region == nullptr) return nullptr;
  pthread_mutex_init(&region->mutex, nullptr);
  pthread_cond_init(&region->end, nullptr);
  return region;
}

void drop(Region* region) {
  if (region->references.fetch_sub(1) != 1) return;
  pthread_mutex_lock(&pool.mutex);
  region->following = pool.spare;
  pool.spare = region;
  pthread_mutex_unlock(&pool.mutex);
}

void work_on(Region* region) {
  for (;;) {
    const int64_t index = region->next.fetch_add(1);
    if (index >= region->count) return;
    region->body(region->context, index);
    if (region->unfinished.fetch_sub(1) == 1) {
      pthread_mutex_lock(&region->mutex);
      region->finished = true;
      pthread_cond_signal(&region->end);
      pthread_mutex_unlock(&region->mutex);
    }
  }
}

void wait_for_end(Region* region) {
  for (int64_t spin = 0; spin < kSpins && region->unfinished.load() > 0; ++spin) relax();
  pthread_mutex_lock(&region->mutex);
  while (!region->finished) pthread_cond_wait(&region->end, &region->mutex);
  pthread_mutex_unlock(&region->mutex);
}

void joined_task(void* argument) { work_on(static_cast<Region*>(argument)); }

void executor_task(void* argument) {
  Region* region = static_cast<Region*>(argument);
  work_on(region);
  drop(region);
}

// With the pool's mutex held: joins a region that wants help, or returns null.
Region* join_region() {
  Region* region = pool.open;
  if (region == nullptr) return nullptr;
  if (--region->openings == 0) pool.open = region->following;
  pool.openings.fetch_sub(1);
  region->references.fetch_add(1);
  return region;
}

void* worker(void*) {
  for (;;) {
    for (int64_t spin = 0; spin < kSpins && pool.openings.load() == 0; ++spin) relax();
    pthread_mutex_lock(&pool.mutex);
    Region* region;
    while ((region = join_region()) == nullptr) {
      ++pool.sleeping;
      pthread_cond_wait(&pool.work, &pool.mutex);
      --pool.sleeping;
    }
    pthread_mutex_unlock(&pool.mutex);
    work_on(region);
    drop(region);
  }
}

// With the pool's mutex held.
void start_workers(int64_t wanted) {
  if (pool.workers >= wanted) return;
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  while (pool.workers < wanted) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, worker, nullptr) != 0) break;
    ++pool.workers;
  }
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void open_to_workers(Region* region, int64_t helpers) {
  pthread_once(&fork_handlers, install_fork_handlers);
  pthread_mutex_lock(&pool.mutex);
  start_workers(helpers);
  region->openings = helpers;
  region->following = pool.open;
  pool.open = region;
  pool.openings.fetch_add(helpers);
  const int64_t woken = helpers < pool.sleeping ? helpers : pool.sleeping;
  for (int64_t i = 0; i < woken; ++i) pthread_cond_signal(&pool.work);
  pthread_mutex_unlock(&pool.mutex);
}

void close_to_workers(Region* region) {
  pthread_mutex_lock(&pool.mutex);
  if (region->openings > 0) {
    Region** link = &pool.open;
    while (*link != region) link = &(*link)->following;
    *link = region->following;
    pool.openings.fetch_sub(region->openings);
    region->openings = 0;
  }
  pthread_mutex_unlock(&pool.mutex);
}

int64_t threads_by_default() {
  const char* text = std::getenv("POLICY_NUM_THREADS");
  if (text != nullptr) {
    char* end;
    const long long value = std::strtoll(text, &end, 10);
    if (end != text && *end == '\0' && value >= 1) return value < kMaxThreads ? value : kMaxThreads;
  }
  return available_cpus();
}

}  // namespace

void wait_a_little(int64_t round) {
  if (round < kSpins) {
    relax();
  } else {
    sched_yield();
  }
}

int64_t threads_for(const pk_executor* executor, int64_t nanoseconds) {
  const int64_t worth = nanoseconds / kNanosecondsPerThread;
  if (worth < 2) return 1;
  const int64_t most = executor != nullptr ? executor->threads : pk_num_threads();
  return worth < most ? worth : most;
}

void parallel_for(const pk_executor* executor, int64_t threads, int64_t count,
                  void (*body)(void*, int64_t), void* context) {
  const int64_t helpers = (threads < count ? threads : count) - 1;
  Region* region = helpers > 0 ? take_region() : nullptr;
  if (region == nullptr) {
    for (int64_t index = 0; index < count; ++index) body(context, index);
    return;
  }
  region->next = 0;
  region->unfinished = count;
  region->references = 1;
  region->count = count;
  region->body = body;
  region->context = context;
  region->openings = 0;
  region->finished = false;
  if (executor != nullptr && executor->run != nullptr) {
    executor->run(executor->context, static_cast<int32_t>(helpers + 1), joined_task, region);
  } else if (executor != nullptr) {
    region->references = 1 + helpers;
    for (int64_t i = 0; i < helpers; ++i) {
      executor->submit(executor->context, executor_task, region);
    }
  } else {
    open_to_workers(region, helpers);
  }
  work_on(region);
  if (executor == nullptr) close_to_workers(region);
  wait_for_end(region);
  drop(region);
}

}  // namespace pk

pk_status pk_set_num_threads(int64_t count) {
  if (count < 0 || count > pk::kMaxThreads) {
    return pk::fail(PK_ERR_ARGUMENT,
                    "pk_set_num_threads: expected count from 1 to %lld, or 0 for the default, got "
                    "%lld",
                    static_cast<long long>(pk::kMaxThreads), static_cast<long long>(count));
  }
  pk::asked_threads.store(count);
  return PK_OK;
}

int64_t pk_num_threads(void) {
  const int64_t asked = pk::asked_threads.load(std::memory_order_relaxed);
  if (asked > 0) return asked;
  int64_t count = pk::default_threads.load(std::memory_order_relaxed);
  if (count == 0) {
    count = pk::threads_by_default();
    pk::default_threads.store(count);
  }
  return count;
}
