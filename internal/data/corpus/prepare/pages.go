package prepare

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"
)

// Limits on a page of a parquet file. The library allocates what the headers of a damaged file ask for.
const (
	maxPage   = 1 << 30 // bytes
	maxValues = 1 << 24
	maxHeader = 16 << 20
)

// checkPages reads the headers of a column chunk's pages, and returns an error if they do not fit the file, exceed the
// limits, or contradict the compressed data.
func checkPages(f io.ReaderAt, size int64, chunk *format.ColumnMetaData) error {
	at := chunk.DataPageOffset
	if chunk.DictionaryPageOffset != 0 {
		at = chunk.DictionaryPageOffset
	}
	total := chunk.TotalCompressedSize
	if at < 0 || total < 0 || at > size || total > size-at {
		return fmt.Errorf("the file is damaged or truncated: %d bytes of pages at byte %d, but the file has %d", total, at, size)
	}
	for end := at + total; at < end; {
		header, n, err := pageHeader(f, at, end)
		if err == nil {
			err = checkPage(f, at+n, end, chunk.Codec, header)
		}
		if err != nil {
			return fmt.Errorf("the file is damaged: page at byte %d: %w", at, err)
		}
		at += n + int64(header.CompressedPageSize)
	}
	return nil
}

// pageHeader returns the header of the page at a position, and its length.
func pageHeader(f io.ReaderAt, at, end int64) (*format.PageHeader, int64, error) {
	for window := int64(4 << 10); ; window *= 8 {
		buf := make([]byte, min(window, end-at))
		if _, err := f.ReadAt(buf, at); err != nil && !errors.Is(err, io.EOF) {
			return nil, 0, err
		}
		header := new(format.PageHeader)
		r := new(thrift.CompactProtocol).NewReaderFromBytes(buf)
		err := thrift.NewDecoder(r).Decode(header)
		if err == nil {
			left, err := io.Copy(io.Discard, r.Reader())
			return header, int64(len(buf)) - left, err
		}
		if window >= end-at || window >= maxHeader {
			return nil, 0, fmt.Errorf("its header cannot be read: %w", err)
		}
	}
}

// checkPage checks the page whose header ends at a position.
func checkPage(f io.ReaderAt, at, end int64, codec format.CompressionCodec, h *format.PageHeader) error {
	packed, unpacked := int64(h.CompressedPageSize), int64(h.UncompressedPageSize)
	values, levels, compressed := int64(0), int64(0), true
	switch {
	case h.DataPageHeaderV2.Valid:
		v := &h.DataPageHeaderV2.V
		values, levels = int64(v.NumValues), int64(v.RepetitionLevelsByteLength)+int64(v.DefinitionLevelsByteLength)
		compressed = !v.IsCompressed.Valid || v.IsCompressed.V
		if v.RepetitionLevelsByteLength < 0 || v.DefinitionLevelsByteLength < 0 || levels > packed || levels > unpacked {
			return fmt.Errorf("levels of %d and %d bytes in a page of %d", v.RepetitionLevelsByteLength, v.DefinitionLevelsByteLength, packed)
		}
	case h.DataPageHeader.Valid:
		values = int64(h.DataPageHeader.V.NumValues)
	case h.DictionaryPageHeader.Valid:
		values = int64(h.DictionaryPageHeader.V.NumValues)
	}
	switch {
	case packed < 0 || packed > end-at:
		return fmt.Errorf("%d bytes, but only %d follow", packed, end-at)
	case unpacked < 0 || unpacked > maxPage:
		return fmt.Errorf("%d bytes after decompression; the limit is %d", unpacked, maxPage)
	case values < 0 || values > maxValues:
		return fmt.Errorf("%d values; the limit is %d", values, maxValues)
	case !compressed || codec != format.Snappy && codec != format.Lz4Raw:
		return nil
	}
	block := make([]byte, packed-levels)
	if _, err := f.ReadAt(block, at+levels); err != nil {
		return err
	}
	n := snappySize(block)
	if codec == format.Lz4Raw {
		n = lz4Size(block)
	}
	if n < 0 || n > unpacked-levels {
		return fmt.Errorf("its %d bytes do not decompress to the %d that its header promises", len(block), unpacked-levels)
	}
	return nil
}

// snappySize returns the size that a block has after decompression, or -1 if it is malformed.
func snappySize(block []byte) int64 {
	n, length := binary.Uvarint(block)
	if length <= 0 || n > maxPage {
		return -1
	}
	return int64(n)
}

// lz4Size returns the size that a block has after decompression, or -1 if it is malformed. The library would enlarge its
// buffer again and again for a malformed block.
func lz4Size(block []byte) (size int64) {
	r := bytes.NewReader(block)
	length := func(n int64) int64 { // 15 or more: further bytes are added, up to one below 255
		for more := byte(255); n >= 15 && more == 255; n += int64(more) {
			var err error
			if more, err = r.ReadByte(); err != nil {
				return -1
			}
		}
		return n
	}
	for {
		token, err := r.ReadByte()
		if err != nil {
			return -1
		}
		literals := length(int64(token >> 4))
		if literals < 0 || literals > int64(r.Len()) {
			return -1
		}
		size += literals
		if _, err := r.Seek(literals, io.SeekCurrent); err != nil {
			return -1
		}
		if r.Len() == 0 {
			if token&15 != 0 {
				return -1
			}
			return size
		}
		var offset [2]byte
		if _, err := io.ReadFull(r, offset[:]); err != nil {
			return -1
		}
		back := int64(binary.LittleEndian.Uint16(offset[:]))
		match := length(int64(token & 15))
		if back == 0 || back > size || match < 0 {
			return -1
		}
		size += match + 4
	}
}
