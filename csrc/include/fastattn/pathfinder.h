/* fastattn/pathfinder.h: images of the Pathfinder task, behind a plain C interface.
 *
 * Two contours of segments grow side by side in an image, then shorter ones, the distractors, where
 * they find a place; two discs mark ends of contours. All that depends on angles is looked up in
 * tables, which src/fastattn/lra/tasks/pathfinder_sprites.py makes and explains. The rest is in
 * integers, and image i of a key draws from a stream of random numbers of its own: the bytes depend
 * neither on the threads nor on the machine. Offsets and places are y, x.
 *
 * A direction is a first segment's degree, 0 to 359, or 360 + the place that a later one ends in.
 */
#ifndef FASTATTN_PATHFINDER_H
#define FASTATTN_PATHFINDER_H

#include <stdint.h>

#include "fastattn/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FA_DEGREES = 360, FA_UNIT = 1 << 16 };

/* Segments with one margin between them; directions = 360 + places. */
typedef struct {
  int32_t margin;              /* in pixels */
  int32_t places;              /* for the next head, round a pivot */
  int32_t width;               /* of a sprite: odd */
  int32_t sprites;             /* how many */
  const int32_t *around;       /* (places, 2): from a pivot */
  const uint32_t *weights;     /* (directions, places): at most FA_UNIT */
  const int32_t *steps;        /* (directions, 2): from a segment's pivot to the next */
  const int32_t *heads;        /* (360, 2): from a first segment's start to its end */
  const int32_t *pivots;       /* (360, 2): and to its pivot */
  const int32_t *starts;       /* (360, 4): y, x, height, width where the first contour starts */
  const int32_t *footprint;    /* (., 2): what a first segment covers, by degree */
  const int32_t *footprint_at; /* (361): where in it a degree begins; none begins if it is empty */
  const int32_t *sprite_of;    /* (directions) */
  const uint8_t *pictures;     /* (sprites, 3, width, width): ink, what is kept free, and wider */
} fa_pathfinder_tables;

typedef struct {
  int32_t size;    /* of a side */
  int32_t padding; /* of a border that is kept free */
  int32_t contour_length, distractor_length, distractors;
  uint32_t contour_ink, distractor_ink; /* in FA_UNITs; a disc has one; at most 256 */
  int32_t disc_width;                   /* odd */
  const uint8_t *disc;                  /* (disc_width, disc_width) */
  const int32_t *ring;                  /* (360, 2): from the first start to the second */
  int32_t margins;                      /* how many, of which an image draws one */
  const fa_pathfinder_tables *tables;   /* (margins) */
} fa_pathfinder;

/* Draw images first ... first + count - 1.
 *
 * images: (count, size, size); labels: (count), 1 if the discs are ends of one contour; margins:
 * (count); attempts: (count), pairs begun until one was complete, or 0 and a black image if none
 * is after 2^22; found: (count), distractors. Allocates; starts threads - 1 threads. */
fa_status fa_pathfinder_draw(const fa_pathfinder *settings, uint64_t key, int64_t first,
                             int64_t count, int threads, uint8_t *images, uint8_t *labels,
                             int32_t *margins, int32_t *attempts, int32_t *found);

#ifdef __cplusplus
}
#endif
#endif
