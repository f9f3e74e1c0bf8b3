"""Pictures as token sequences and back, and the readers of IDX files, image folders and zips.

Beside the letters of `shapes.py`:

| letter | meaning                                       |
| ------ | --------------------------------------------- |
| N      | pictures                                      |
| H, W   | rows and columns of pixels                    |
| L      | tokens of a picture, in raster order          |
"""

from memtrain.data.pictures.copies import Copies
from memtrain.data.pictures.files import Pictures, read_folder, read_image
from memtrain.data.pictures.idx import read_idx
from memtrain.data.pictures.tokens import Picture, decode_pictures, encode_pictures

__all__ = [
    "Copies",
    "Picture",
    "Pictures",
    "decode_pictures",
    "encode_pictures",
    "read_folder",
    "read_idx",
    "read_image",
]
