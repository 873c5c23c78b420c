/* fastattn/status.h: what every call of the native part returns. */
#ifndef FASTATTN_STATUS_H
#define FASTATTN_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* 0, an error of CUDA's runtime (positive), or one of ours. */
typedef int fa_status;
enum { FA_OK = 0, FA_BAD_ARGUMENT = -1, FA_NO_CUDA = -2, FA_OUT_OF_MEMORY = -3 };

/* What went wrong, in words that stay. */
const char *fa_status_string(fa_status status);

#ifdef __cplusplus
}
#endif
#endif
