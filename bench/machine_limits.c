/* What this machine can do at best: GB/s of reading memory and GFLOP/s of multiply-adds, on the number of threads that the
 * first argument says. Prints "GB/s fp32-GFLOP/s bf16-GFLOP/s" (bf16: 0 without such an instruction). Best of some rounds. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__)
#include <immintrin.h>
typedef float vec __attribute__((vector_size(64)));
#else
typedef float vec __attribute__((vector_size(32)));
#endif

enum { MAX_THREADS = 64, ROUNDS = 40, ACCUMULATORS = 12, TURNS = 1000000 };
static const size_t BYTES = (size_t)512 << 20;

typedef void (*Work)(int thread, int threads);
static char* memory;
static volatile float sink;

static void read_all(int thread, int threads) {
    const size_t share = BYTES / threads / 256 * 256;
    const char* p = memory + share * thread;
    vec a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t at = 0; at + 4 * sizeof(vec) <= share; at += 4 * sizeof(vec)) {
        const vec* v = (const vec*)(p + at);
        __builtin_prefetch(p + at + 2048);
        __builtin_prefetch(p + at + 2048 + 2 * sizeof(vec));
        a += v[0], b += v[1], c += v[2], d += v[3];
    }
    a += b + c + d;
    sink += a[0];
}

static void multiply_fp32(int thread, int threads) {
    (void)threads;
    vec sums[ACCUMULATORS], x, y;
    memset(&x, 0, sizeof x), memset(&y, 0, sizeof y);
    x += 1.0001f, y += 0.9999f;
    for (int i = 0; i < ACCUMULATORS; i++) sums[i] = x * (float)(i + thread);
    for (long turn = 0; turn < TURNS; turn++) {
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; i++) sums[i] = x * y + sums[i];
        __asm__ volatile("" : "+r"(turn) : :);
    }
    for (int i = 0; i < ACCUMULATORS; i++) sink += sums[i][0];
}

#if defined(__AVX512BF16__)
static void multiply_bf16(int thread, int threads) {
    (void)threads;
    __m512 sums[ACCUMULATORS];
    const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int i = 0; i < ACCUMULATORS; i++) sums[i] = _mm512_set1_ps((float)(i + thread));
    for (long turn = 0; turn < TURNS; turn++) {
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], x, x);
        __asm__ volatile("" : "+r"(turn) : :);
    }
    for (int i = 0; i < ACCUMULATORS; i++) sink += _mm512_reduce_add_ps(sums[i]);
}
#endif

typedef struct {
    Work work;
    int thread, threads;
    pthread_barrier_t* start;
} Job;

static void* run(void* argument) {
    const Job* job = argument;
    pthread_barrier_wait(job->start);
    job->work(job->thread, job->threads);
    return NULL;
}

static double seconds(Work work, int threads) {
    pthread_t started[MAX_THREADS];
    Job jobs[MAX_THREADS];
    pthread_barrier_t start;
    struct timespec began, ended;
    pthread_barrier_init(&start, NULL, threads);
    for (int i = 0; i < threads; i++) jobs[i] = (Job){work, i, threads, &start};
    for (int i = 1; i < threads; i++) pthread_create(&started[i], NULL, run, &jobs[i]);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &began);
    run(&jobs[0]);
    for (int i = 1; i < threads; i++) pthread_join(started[i], NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ended);
    pthread_barrier_destroy(&start);
    const double spent = (double)(ended.tv_sec - began.tv_sec) + 1e-9 * (double)(ended.tv_nsec - began.tv_nsec);
    return spent / threads; /* processor time: others that want the cores do not count */
}

static double best(Work work, int threads, double amount) {
    double most = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const double rate = amount / seconds(work, threads) / 1e9;
        if (rate > most) most = rate;
    }
    return most;
}

int main(int count, char** arguments) {
    const int threads = count > 1 ? atoi(arguments[1]) : 1;
    if (threads < 1 || threads > MAX_THREADS) return 1;
    memory = aligned_alloc(4096, BYTES);
    if (!memory) return 1;
    memset(memory, 0, BYTES);
    const double turns = (double)threads * TURNS * ACCUMULATORS * 2;
    printf("%.1f ", best(read_all, threads, (double)BYTES));
    printf("%.0f ", best(multiply_fp32, threads, turns * sizeof(vec) / 4));
#if defined(__AVX512BF16__)
    printf("%.0f\n", best(multiply_bf16, threads, turns * 32));
#else
    printf("0\n");
#endif
    return 0;
}
