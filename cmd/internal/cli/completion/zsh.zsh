#compdef PROGRAM
# Completion of PROGRAM for zsh.

_PROGRAM() {
	local -a lines described open endings
	local line directive word
	lines=("${(@f)$("${words[1]/#\~/$HOME}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
	for line in $lines; do
		if [[ $line == :* ]]; then
			directive=$line
			continue
		fi
		word=${${line%%$'\t'*}//:/\\:}
		if [[ $line == *$'\t'* ]]; then
			described+=("$word:${line#*$'\t'}")
		else
			described+=("$word")
		fi
	done
	if [[ $directive == :nospace ]]; then open=(-S ''); fi
	if (( $#described )); then _describe -V PROGRAM described "${open[@]}"; fi
	if [[ $directive == :files* ]]; then
		endings=(${=directive#:files})
		if (( $#endings )); then
			_files -g "*.(${(j:|:)endings})(-.)"
		else
			_files
		fi
	fi
}

if [[ $funcstack[1] == _PROGRAM ]]; then
	_PROGRAM "$@"
else
	compdef _PROGRAM PROGRAM
fi
