// Does Mesa's software renderer damage the heap? Draws a tiny triangle and reads it back, over and over.
//
//   gcc -w -O1 -o mesa_threads tools/mesa_threads.c -ldl
//   LP_NUM_THREADS=1 ./mesa_threads 60    # several at once, on busy cores; 0: without threads
//   GLIBC_TUNABLES=glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0   # finds damage sooner
//
// Needs no OpenGL headers. See vla_gym.sim.rendering.renderer.without_mesa_threads and docs/limits.md.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { SIZE = 16, BLOCKS = 64 };
typedef void *Address;
typedef unsigned Enum;

static Address egl;
static Address (*find)(const char *);

static Address in_egl(const char *name) { return dlsym(egl, name); }

static int make_context(void) {
  Address (*display_of)(Enum, Address, const int *) = find("eglGetPlatformDisplayEXT");
  int (*devices_of)(int, Address *, int *) = find("eglQueryDevicesEXT");
  int (*initialize)(Address, int *, int *) = in_egl("eglInitialize");
  int (*choose)(Address, const int *, Address *, int, int *) = in_egl("eglChooseConfig");
  int (*bind)(Enum) = in_egl("eglBindAPI");
  Address (*context_of)(Address, Address, Address, const int *) = in_egl("eglCreateContext");
  Address (*surface_of)(Address, Address, const int *) = in_egl("eglCreatePbufferSurface");
  int (*make_current)(Address, Address, Address, Address) = in_egl("eglMakeCurrent");
  const int wanted[] = {0x3024, 8, 0x3023, 8, 0x3022, 8, 0x3033, 1, 0x3040, 8, 0x3038};
  const int size[] = {0x3057, SIZE, 0x3056, SIZE, 0x3038};
  Address device = NULL, config = NULL;
  int count = 0, major, minor;
  if (!devices_of(1, &device, &count) || count == 0) return 0;
  Address display = display_of(0x313F, device, NULL);
  initialize(display, &major, &minor);
  choose(display, wanted, &config, 1, &count);
  bind(0x30A2);
  Address surface = surface_of(display, config, size);
  return make_current(display, surface, surface, context_of(display, config, NULL, NULL));
}

int main(int count, char **arguments) {
  egl = dlopen("libEGL.so.1", RTLD_NOW);
  if (count != 2 || egl == NULL) return puts("usage: mesa_threads SECONDS, with libEGL.so.1"), 2;
  find = in_egl("eglGetProcAddress");
  if (!make_context()) return puts("no EGL device can render"), 2;
  void (*clear)(Enum) = find("glClear"), (*begin)(Enum) = find("glBegin"), (*end)(void) = find("glEnd");
  void (*vertex)(float, float) = find("glVertex2f");
  void (*read)(int, int, int, int, Enum, Enum, Address) = find("glReadPixels");
  const char *(*name)(Enum) = find("glGetString");
  puts(name(0x1F01));
  fflush(stdout);
  static unsigned char pixels[4 * SIZE * SIZE];
  Address blocks[BLOCKS] = {NULL};
  const time_t stop = time(NULL) + atol(arguments[1]);
  long images = 0;
  for (; images % 1024 || time(NULL) < stop; images++) {
    clear(0x4000);
    begin(4);
    vertex(-1, -1), vertex(1, -1), vertex(0, 1);
    end();
    read(0, 0, SIZE, SIZE, 0x1908, 0x1401, pixels);
    // Somebody else who uses the heap, and notices.
    free(blocks[images % BLOCKS]);
    blocks[images % BLOCKS] = malloc(24 + images * 40503 % 2000);
  }
  printf("%ld images\n", images);
  return 0;
}
