"""The inputs that every benchmark uses: frames of images, in patches of 14 pixels."""

# rows -> frames (height, width): square images of 224, 336 and 504 pixels, then 672 x 504, 1036 x 756, 1344 x 1008,
# eight of 504 and 2044 x 1540
FRAMES = {
    256: [(16, 16)],
    576: [(24, 24)],
    1296: [(36, 36)],
    1728: [(36, 48)],
    3996: [(54, 74)],
    6912: [(72, 96)],
    10368: [(36, 36)] * 8,
    16060: [(110, 146)],
}
HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE = 1280, 16, 80, 5120
