// The whole test framework: CHECK(condition) or CHECK(condition, format, ...) counts and prints
// what failed; check_report ends the program with the verdict.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int checks_passed, checks_failed;

#define CHECK(condition, ...)                                       \
  do {                                                              \
    if (condition) {                                                \
      checks_passed++;                                              \
    } else {                                                        \
      checks_failed++;                                              \
      printf("%s:%d: FAILED: %s.", __FILE__, __LINE__, #condition); \
      printf(" " __VA_ARGS__);                                      \
      printf("\n");                                                 \
    }                                                               \
  } while (0)

static char scratch_dir[] = "/tmp/bs-test-XXXXXX";

static void remove_scratch(void) {
  char command[64];
  snprintf(command, sizeof command, "rm -r %s", scratch_dir);
  if (system(command) != 0) printf("%s is left\n", scratch_dir);
}

// A directory of this process's own, gone at its end: the plain and the sanitized build of a test
// run side by side.
static inline const char* scratch(void) {
  static int made;
  if (!made++) {
    if (!mkdtemp(scratch_dir)) abort();
    atexit(remove_scratch);
  }
  return scratch_dir;
}

// NAME in it; the last four results stay valid.
static inline const char* scratch_file(const char* name) {
  static char paths[4][128];
  static int turn;
  char* path = paths[turn++ % 4];
  snprintf(path, sizeof paths[0], "%s/%s", scratch(), name);
  return path;
}

static int check_report(void) {
  printf("%d passed, %d failed\n", checks_passed, checks_failed);
  return checks_failed != 0;
}
