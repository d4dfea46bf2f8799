#define _GNU_SOURCE
#include <execinfo.h>
#include <signal.h>
#include <unistd.h>
#include <string.h>
#include <stdlib.h>
static struct sigaction old[65];
static void on(int s, siginfo_t *i, void *u) {
  void *a[64]; int n = backtrace(a, 64);
  write(2, "NATIVE\n", 7); backtrace_symbols_fd(a, n, 2);
  sigaction(s, &old[s], 0); raise(s);
}
int install(void) {
  void *a[2]; backtrace(a, 2);
  struct sigaction sa; memset(&sa, 0, sizeof sa); sa.sa_sigaction = on; sa.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGABRT, &sa, &old[SIGABRT]); sigaction(SIGBUS, &sa, &old[SIGBUS]);
  return sigaction(SIGSEGV, &sa, &old[SIGSEGV]);
}
