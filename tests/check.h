// The whole test framework: CHECK counts, prints what failed, and check_report ends the program with the verdict.
#include <stdio.h>

static int checks_passed, checks_failed;

#define CHECK(condition, ...)                           \
  do {                                                  \
    if (condition) {                                    \
      checks_passed++;                                  \
    } else {                                            \
      checks_failed++;                                  \
      printf("%s:%d: FAILED: ", __FILE__, __LINE__);    \
      printf(__VA_ARGS__);                              \
      printf("\n");                                     \
    }                                                   \
  } while (0)

static int check_report(void) {
  printf("%d passed, %d failed\n", checks_passed, checks_failed);
  return checks_failed != 0;
}
