#include "scratch.h"

#include <pthread.h>

#include <cstdint>
#include <cstdlib>

namespace pk {
namespace {

struct Scratch {
  void* data;  // from malloc
  size_t bytes;
};

thread_local Scratch scratch = {nullptr, 0};

pthread_once_t once = PTHREAD_ONCE_INIT;
pthread_key_t key;
bool has_key = false;

// A thread_local destructor would need the C++ runtime; a pthread key does not.
void make_key() { has_key = pthread_key_create(&key, std::free) == 0; }

}  // namespace

void* thread_scratch(size_t bytes) {
  if (bytes > scratch.bytes) {
    pthread_once(&once, make_key);
    std::free(scratch.data);
    scratch = {nullptr, 0};
    if (has_key) pthread_setspecific(key, nullptr);
    // A large size may have no rounding up: see the caller, which limits it.
    void* data = std::malloc(bytes + 64);
    if (data == nullptr) return nullptr;
    if (has_key) pthread_setspecific(key, data);
    scratch = {data, bytes};
  }
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data) + 63) / 64 * 64);
}

}  // namespace pk
