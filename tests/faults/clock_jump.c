/* Preloaded into the daemon and its engine: the time of day is off by as many seconds as stand in the mapped file CLOCK_JUMP. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static const volatile long *offset;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_JUMP"), O_RDONLY | O_CLOEXEC);
    offset = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    real = dlsym(RTLD_NEXT, "clock_gettime");
    if (offset == MAP_FAILED || real == NULL)
        abort();
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (real == NULL) /* called before the constructor */
        begin();
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        now->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (place != NULL)
        *place = exact.tv_sec;
    return exact.tv_sec;
}
