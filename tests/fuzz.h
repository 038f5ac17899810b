// What the coverage-guided fuzzers (fuzz_*.c) share; tests/fuzz.sh builds and runs them with
// clang's libFuzzer. A harness for another file is fifteen lines: write the input under
// fuzz_path(name), call the loader, abort() where it breaks a promise. Crashes, hangs and large
// allocations are libFuzzer's to find, with the address and undefined-behaviour sanitizers.
#define BS_NO_MAIN
#include "../bs.cu"

static char fuzz_dir[64];

static const char* fuzz_path(const char* name) {
  static char path[128];
  if (fuzz_dir[0] == '\0') {
    snprintf(fuzz_dir, sizeof fuzz_dir, "/dev/shm/bs-fuzz-%d", (int)getpid());
    if (mkdir(fuzz_dir, 0700) != 0) abort();
  }
  snprintf(path, sizeof path, "%s/%s", fuzz_dir, name);
  return path;
}

static void fuzz_write(const char* name, const void* data, size_t n) {
  const int fd = open(fuzz_path(name), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd < 0 || write(fd, data, n) != (ssize_t)n || close(fd) != 0) abort();
}

// A refusal is one line of text that names a place.
static void fuzz_check_error(const char* err) {
  const char* end = (const char*)memchr(err, '\0', ERR_LEN);
  if (end == NULL || end == err || strstr(err, ": ") == NULL) abort();
  for (; *err != '\0'; err++)
    if (iscntrl((unsigned char)*err)) abort();
}
