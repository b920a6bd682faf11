// How many CPUs this process may use.
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "threads.h"

namespace pk {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The CPUs that a quota of `quota` in each `period` amounts to, rounded up.
int64_t quota_cpus(long long quota, long long period, int64_t otherwise) {
  if (quota <= 0 || period <= 0) return otherwise;
  return (quota + period - 1) / period;
}

// The quota of one cgroup folder, version 2 (one file) or version 1 (two files).
int64_t folder_cpus(const char* folder, int64_t most) {
  char path[640];
  long long quota = 0, period = 0;
  std::snprintf(path, sizeof path, "%s/cpu.max", folder);
  if (std::FILE* file = std::fopen(path, "re")) {
    // "max 100000" where there is no limit; the number is then not read.
    const int read = std::fscanf(file, "%lld %lld", &quota, &period);
    std::fclose(file);
    return read == 2 ? smaller(most, quota_cpus(quota, period, most)) : most;
  }
  const char* names[] = {"cpu.cfs_quota_us", "cpu.cfs_period_us"};
  long long* values[] = {&quota, &period};
  for (int i = 0; i < 2; ++i) {
    std::snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return most;
    if (std::fscanf(file, "%lld", values[i]) != 1) quota = 0;
    std::fclose(file);
  }
  return smaller(most, quota_cpus(quota, period, most));
}

// The tightest quota on the way from a cgroup to the root.
int64_t cgroup_cpus(const char* mount, char* group, int64_t most) {
  char folder[512];
  for (;;) {
    std::snprintf(folder, sizeof folder, "%s%s", mount, group);
    most = folder_cpus(folder, most);
    char* slash = std::strrchr(group, '/');
    if (slash == nullptr) return most;
    *slash = '\0';
  }
}

}  // namespace

int64_t available_cpus() {
  int64_t count = sysconf(_SC_NPROCESSORS_ONLN);
#ifdef __linux__
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) count = CPU_COUNT(&allowed);
  // Lines of "<number>:<controllers>:<group>"; version 2 has the number 0 and no controllers.
  if (std::FILE* file = std::fopen("/proc/self/cgroup", "re")) {
    char line[384];
    while (std::fgets(line, sizeof line, file) != nullptr) {
      line[std::strcspn(line, "\n")] = '\0';
      char* group = std::strchr(line, '/');
      if (group == nullptr) continue;
      if (std::strncmp(line, "0::", 3) == 0) count = cgroup_cpus("/sys/fs/cgroup", group, count);
      if (std::strstr(line, ":cpu,") != nullptr || std::strstr(line, ",cpu:") != nullptr ||
          std::strstr(line, ":cpu:") != nullptr) {
        count = cgroup_cpus("/sys/fs/cgroup/cpu", group, count);
      }
    }
    std::fclose(file);
  }
#endif
  return count >= 1 ? count : 1;
}

}  // namespace pk
