// The whole test framework: CHECK(condition) or CHECK(condition, format, ...) counts and prints
// what failed; check_report ends the program with the verdict.
#include <stdio.h>

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

static int check_report(void) {
  printf("%d passed, %d failed\n", checks_passed, checks_failed);
  return checks_failed != 0;
}
