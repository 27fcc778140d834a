/* Threads call every kernel of an export at once, with more arrays than the launcher keeps tensor maps for.
 *
 * The fake driver refuses a tensor map whose words do not belong together. Prints how many threads met an error.
 */
#include <pthread.h>
#include <stdio.h>

#include "schedsearch_kernels.h"

int cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);

enum { THREADS = 4, CALLS = 1000, SETS = 50 };

static int codes[THREADS];

static void *call(void *number)
{
    schedsearch_scalar scalars[64] = {{0}};
    const void *arrays[64];
    int *code = &codes[(size_t)number];
    void *context;
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxSetCurrent(context);
    for (size_t n = 0; n < CALLS && !*code; n++)
        for (size_t k = 0; k < schedsearch_kernel_count && !*code; k++) {
            size_t set = (n * 5 + (size_t)number) % SETS + 1;
            for (size_t i = 0; i < schedsearch_kernels[k]->pointers; i++)
                arrays[i] = (const void *)((set << 32) + (i << 20));
            *code = schedsearch_run(schedsearch_kernels[k], NULL, arrays, scalars, (void *)(set << 40));
        }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    int failed = 0;
    for (size_t n = 0; n < THREADS; n++)
        pthread_create(&threads[n], NULL, call, (void *)n);
    for (size_t n = 0; n < THREADS; n++)
        pthread_join(threads[n], NULL);
    for (size_t n = 0; n < THREADS; n++)
        failed += codes[n] != SCHEDSEARCH_OK;
    printf("%d threads failed\n", failed);
    return failed;
}
