/* fastattn/fft_conv.h: long convolutions of many rows, behind a plain C interface.
 *
 *     y[i] = post[i] * (sum over taps of tap[t] * x[i - lag(t)] + skip * x[i]),  x = pre * u
 *
 * where lag(t) = first + t, or its negative where mirrored. Rows are (sample, channel); inputs
 * before the first and behind the last are zeros. Arithmetic is in float32. What runs on a GPU
 * does not allocate, wait, or use a stream but the one given; every call returns a status.
 */
#ifndef FASTATTN_FFT_CONV_H
#define FASTATTN_FFT_CONV_H

#include <stdint.h>

#include "fastattn/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { FA_FLOAT32 = 0, FA_BFLOAT16 = 1, FA_FLOAT16 = 2 } fa_type;

/* (sample, channel, n), strides in elements; data is NULL where there is none. */
typedef struct {
  void *data;
  int64_t b, c, n;
} fa_tensor;

typedef struct {
  int64_t batch, channels;
  int64_t group;        /* channels that share a row of taps, side by side */
  int64_t n, out;       /* inputs and outputs of a row */
  int64_t first, count; /* taps */
  int mirrored;
  fa_type type;   /* of inputs, outputs and gates */
  int64_t length; /* of the transform: fa_conv_length, or another that it may return */
  int64_t slices; /* that the samples, or windows, are cut into, for one block each; of long rows on
                     a GPU, how many channels are worked on at a time */
  int64_t valid;  /* 0, and a row is one transform; or see fa_conv_valid */
} fa_conv_shape;

/* Rows much longer than their taps are cut into windows of 2 length inputs, each one transform, of
 * which so many outputs are right (overlap-save): 2 length less the span of the lags and of zero,
 * or less than 1 where that leaves none. There are ceil(out / valid) windows. Lags stay below
 * length. */
int64_t fa_conv_valid(const fa_conv_shape *shape);

/* Up to how many inputs a row is one transform on a device; its status where nothing runs there. */
fa_status fa_conv_longest(int device, int64_t *longest);

/* The shortest transform that does it, or 0 if there is none. Ignores length and slices. */
int64_t fa_conv_length(const fa_conv_shape *shape);

/* The table of a transform's roots: how many floats, and their values, made in double precision.
 * Of long rows' transforms too. */
int64_t fa_conv_table_size(int64_t length);
fa_status fa_conv_table(int64_t length, float *table);

/* Floats that a call, forward or backward, needs as workspace on a device. */
int64_t fa_conv_workspace(const fa_conv_shape *shape, int backward, int device);

/* taps: (channels / group, count); skip: (channels) or NULL; table and workspace on the device. */
fa_status fa_conv_cuda(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre, fa_tensor post,
                       fa_tensor y, const float *taps, const float *skip, const float *table,
                       float *workspace, int device, void *stream);

/* Gradients of all of it: du, dpre, dpost like u, pre, post, or absent; dtaps: (slices, channels,
 * count) and dskip: (slices, channels), to be summed over what shares them, or NULL. Rows of more
 * than 2048 have to be contiguous, here and above.
 *
 * Long rows are those whose length is from 32768 to 4194304: lags may be of any length, samples
 * times slices are at most 16383, there is no dpost and no dskip, and dtaps is (channels, count),
 * where taps that reach nothing stay. */
fa_status fa_conv_backward_cuda(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre,
                                fa_tensor post, fa_tensor dy, fa_tensor du, fa_tensor dpre,
                                fa_tensor dpost, const float *taps, const float *skip, float *dtaps,
                                float *dskip, const float *table, float *workspace, int device,
                                void *stream);

/* Of rows in windows of a `length` of 1024 or 4096, contiguous: dtaps alone, as above; the other
 * gradients are convolutions. */
fa_status fa_correlate_cuda(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre, fa_tensor post,
                            fa_tensor dy, float *dtaps, const float *table, float *workspace,
                            int device, void *stream);

/* The whole on a CPU, for lengths that are any power of two not below n and out and above every
 * lag; without table and workspace. They allocate, and know the roots of lengths before. Slices are
 * at most as many as fa_conv_cpu_slices says for any number of threads. */
int64_t fa_conv_cpu_slices(const fa_conv_shape *shape, int threads);
fa_status fa_conv_cpu(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre, fa_tensor post,
                      fa_tensor y, const float *taps, const float *skip, int threads);
/* As fa_correlate_cuda, for windows of any length. */
fa_status fa_correlate_cpu(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre, fa_tensor post,
                           fa_tensor dy, float *dtaps, int threads);
fa_status fa_conv_backward_cpu(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre,
                               fa_tensor post, fa_tensor dy, fa_tensor du, fa_tensor dpre,
                               fa_tensor dpost, const float *taps, const float *skip, float *dtaps,
                               float *dskip, int threads);

/* Why CUDA cannot be used here, FA_OK if it can. Does not touch a device if there is none. */
fa_status fa_cuda_available(void);

#ifdef __cplusplus
}
#endif
#endif
