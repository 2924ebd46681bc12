package infile

import "strings"

// formats lists the first bytes of common formats.
var formats = []struct{ begins, name string }{
	{"\x89PNG", "a PNG image"}, {"\xff\xd8\xff", "a JPEG image"}, {"GIF8", "a GIF image"}, {"%PDF-", "a PDF document"},
	{"PK\x03\x04", "a zip archive"}, {"\x1f\x8b", "a gzip file"}, {"\x28\xb5\x2f\xfd", "a zstd file"}, {"\x7fELF", "an executable"},
	{"sppb\r\n\x1a\n", "a program"}, {"PAR1", "a parquet file"}, {"\x93NUMPY", "a NumPy array"}, {"SQLite format 3", "an SQLite database"},
	{"\xff\xfe", "UTF-16 text"}, {"\xfe\xff", "UTF-16 text"}, {"<?xml", "XML"}, {"<svg", "an SVG image"}, {"<!DOCTYPE", "HTML"}, {"<html", "HTML"},
}

// Format names the format of a file, given its first bytes, and returns how many of them are those of the format. The name is empty if
// the format is none of the known ones.
func Format(start string) (name string, begins int) {
	for _, f := range formats {
		if strings.HasPrefix(start, f.begins) {
			return f.name, len(f.begins)
		}
	}
	return "", 0
}
