/* cuBLAS and cuBLASLt: handles and settings are accepted, products are counted as launches and skipped. */
#include "null_gpu.h"
#include <string.h>

#define VERSION 130101
typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } heuristic;

EXPORT int cublasCreate_v2(void **handle) {
    *handle = (void *)0x1000; /* nobody looks into it */
    return 0;
}
EXPORT int cublasLtCreate(void **handle) { return cublasCreate_v2(handle); }

EXPORT int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) { return cublasGetMathMode(handle, mode); }

EXPORT int cublasGetVersion_v2(void *handle, int *version) {
    *version = VERSION;
    return 0;
}
EXPORT size_t cublasLtGetVersion(void) { return VERSION; }
EXPORT size_t cublasLtGetCudartVersion(void) { return 13000; }

EXPORT int cublasGetProperty(int which, int *value) {
    *value = which == 0 ? 13 : 1;
    return 0;
}
EXPORT int cublasLtGetProperty(int which, int *value) { return cublasGetProperty(which, value); }

EXPORT const char *cublasGetStatusString(int status) { return status ? "refused by the null GPU" : "CUBLAS_STATUS_SUCCESS"; }
EXPORT const char *cublasLtGetStatusString(int status) { return cublasGetStatusString(status); }

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                          heuristic *found, int *count) {
    memset(found, 0, sizeof *found);
    *count = 1;
    return 0;
}

EXPORT int cublasLtMatmulAlgoCheck(void *handle, void *product, void *a, void *b, void *c, void *d, void *algorithm, heuristic *found) {
    memset(found, 0, sizeof *found);
    return 0;
}

EXPORT int cublasLtMatmulAlgoConfigGetAttribute(void *algorithm, int which, void *value, size_t size, size_t *written) {
    memset(value, 0, size);
    if (written)
        *written = size;
    return 0;
}

/* Settings that change nothing here. */
#define ACCEPT(name) EXPORT int name(void) { return 0; }
#define CREATE(name) EXPORT int name(void **made) { return cublasCreate_v2(made); }
/* Products and solutions: only counted. */
#define SKIP(name) EXPORT int name(void) { return has_values(#name, NULL) ? COUNT(launches), 0 : 15; }

CREATE(cublasLtMatmulDescCreate) CREATE(cublasLtMatmulPreferenceCreate) CREATE(cublasLtMatrixLayoutCreate)
ACCEPT(cublasDestroy_v2)
ACCEPT(cublasLtMatmulAlgoConfigSetAttribute) ACCEPT(cublasLtMatmulAlgoInit) ACCEPT(cublasLtMatmulDescDestroy)
ACCEPT(cublasLtMatmulDescSetAttribute) ACCEPT(cublasLtMatmulPreferenceDestroy)
ACCEPT(cublasLtMatmulPreferenceSetAttribute) ACCEPT(cublasLtMatrixLayoutDestroy)
ACCEPT(cublasLtMatrixLayoutSetAttribute) ACCEPT(cublasSetMathMode) ACCEPT(cublasSetPointerMode_v2)
ACCEPT(cublasSetSmCountTarget) ACCEPT(cublasSetStream_v2) ACCEPT(cublasSetWorkspace_v2)

SKIP(cublasCdotc_v2) SKIP(cublasCdotu_v2) SKIP(cublasCgelsBatched) SKIP(cublasCgemmStridedBatched)
SKIP(cublasCgemm_v2) SKIP(cublasCgemv_v2) SKIP(cublasCgeqrfBatched) SKIP(cublasCgetrfBatched)
SKIP(cublasCgetrsBatched) SKIP(cublasCtrsmBatched) SKIP(cublasCtrsm_v2) SKIP(cublasDdot_v2) SKIP(cublasDgelsBatched)
SKIP(cublasDgemmStridedBatched) SKIP(cublasDgemm_v2) SKIP(cublasDgemv_v2) SKIP(cublasDgeqrfBatched)
SKIP(cublasDgetrfBatched) SKIP(cublasDgetrsBatched) SKIP(cublasDotEx) SKIP(cublasDtrsmBatched) SKIP(cublasDtrsm_v2)
SKIP(cublasGemmEx) SKIP(cublasGemmStridedBatchedEx) SKIP(cublasLtMatmul) SKIP(cublasSdot_v2)
SKIP(cublasSgelsBatched) SKIP(cublasSgemmEx) SKIP(cublasSgemmStridedBatched) SKIP(cublasSgemm_v2)
SKIP(cublasSgemv_v2) SKIP(cublasSgeqrfBatched) SKIP(cublasSgetrfBatched) SKIP(cublasSgetrsBatched)
SKIP(cublasStrsmBatched) SKIP(cublasStrsm_v2) SKIP(cublasZdotc_v2) SKIP(cublasZdotu_v2) SKIP(cublasZgelsBatched)
SKIP(cublasZgemmStridedBatched) SKIP(cublasZgemm_v2) SKIP(cublasZgemv_v2) SKIP(cublasZgeqrfBatched)
SKIP(cublasZgetrfBatched) SKIP(cublasZgetrsBatched) SKIP(cublasZtrsmBatched) SKIP(cublasZtrsm_v2)
